import hypothesis
import pytest
import torch

# Timings on shared machines say nothing; a first call also pays for imports.
hypothesis.settings.register_profile("loramux", deadline=None)
hypothesis.settings.load_profile("loramux")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)
