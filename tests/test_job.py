"""A job's stages and the position that checkpoints carry."""

import jax
import pytest
from etils import epath

from bertjax import job, objectives, optim


@pytest.fixture
def two_stages():
  """The paper's two phases, of which nothing is ever opened."""
  stage = lambda steps: job.Stage(
      objective=objectives.PRETRAINING, num_steps=steps, batch_size=256,
      optimizer=optim.OptimizerSettings(), open=lambda: None, flops_per_row=float)
  return job.Job(
      title='test', build=lambda rngs: None, stages=(stage(900_000), stage(100_000)),
      mesh=jax.make_mesh((1,), ('data',), devices=jax.devices()[:1]), seed=0, metadata={},
      tokenizer=epath.Path('nowhere'))


def test_a_step_belongs_to_the_stage_that_takes_it(two_stages):
  assert two_stages.num_steps == 10**6 and two_stages.starts() == (0, 900_000)
  assert [two_stages.stage_at(step) for step in (0, 899_999, 900_000, 10**6)] == [0, 0, 1, 1]


def test_the_position_counts_the_rows_of_all_stages(two_stages):
  assert two_stages.position(900_010) == {
      'phase': 1, 'step_in_phase': 10, 'rows_seen': 256 * 900_010}


def test_impossible_checkpoint_settings_are_refused():
  with pytest.raises(ValueError, match='every 0'):
    job.CheckpointSettings(every=0)
