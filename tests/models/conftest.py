from tests.models.small_models import *  # noqa: F403
