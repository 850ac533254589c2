"""TransformerEngine's layers without a GPU: they can be made, loaded, exported and saved on the
CPU; their forward cannot run.

`make test-te VENV=...` runs these tests in an environment that has TransformerEngine; elsewhere all
are skipped.
"""

import pytest


def pytest_collection_modifyitems(items):
    try:
        import torch  # noqa: F401  first: it loads the CUDA libraries
        import transformer_engine.pytorch  # noqa: F401
    # absent, or its libraries are: the reason is shown
    except (ImportError, OSError, RuntimeError) as error:
        reason = (
            f"TransformerEngine cannot be imported ({type(error).__name__}: {error}); run make"
            " test-te VENV=ENVIRONMENT"
        )
        for item in items:
            if "tests/te/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=reason[:300]))
