from rush.files import *  # noqa: F403  (gone in a moment: import from rush.files)
