"""What every test shares: hypothesis that repeats itself and does not mind a slow machine."""

from hypothesis import settings

settings.register_profile("stepscope", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("stepscope")
