"""Settings for all tests."""

from hypothesis import settings

settings.register_profile("project", deadline=None)  # a busy machine is not a bug
settings.load_profile("project")
