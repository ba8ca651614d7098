"""Set up for the whole suite: eight virtual CPU devices, shape checks on, the shared/ fixtures."""

import os
import pathlib
import signal

# Before JAX is imported: eight virtual devices on one CPU, so that meshes are tested anywhere.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# Programs here run once or twice: compiling them well takes longer than running them.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')

import pytest
from absl import logging
from jaxtyping import install_import_hook

# Every annotated function of the package checks its array shapes while the suite runs.
install_import_hook('bertjax', 'beartype.beartype')


# A background job of a shell ignores SIGINT, and so would every command that is interrupted here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)


def find_shared() -> pathlib.Path | None:
  """The folder of reference data: $BERTJAX_SHARED, or ../shared beside the checkout."""
  named = os.environ.get('BERTJAX_SHARED')
  folder = pathlib.Path(named) if named else pathlib.Path(__file__).parents[2] / 'shared'
  return folder if folder.is_dir() else None


@pytest.fixture(autouse=True)
def _everything_is_logged():
  """Commands that were called in a test set how much is said; the next test may look at the log."""
  logging.set_verbosity(logging.INFO)


@pytest.fixture(scope='session')
def shared() -> pathlib.Path:
  """Reference data that a stranger's clone does not have; tests that need it are skipped there."""
  folder = find_shared()
  if folder is None:
    pytest.skip('no reference data: set BERTJAX_SHARED or put it at ../shared')
  return folder


@pytest.fixture(scope='session')
def golden(shared: pathlib.Path) -> pathlib.Path:
  return shared / 'golden'


@pytest.fixture(scope='session')
def bugs(shared: pathlib.Path) -> pathlib.Path:
  """Inputs of the public bug reports (shared/bugs/open)."""
  return shared / 'bugs' / 'open'
