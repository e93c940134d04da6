from tests.lab.lab_fixtures import *  # noqa: F403
