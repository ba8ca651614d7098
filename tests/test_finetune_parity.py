"""A hundred steps of every head against Transformers' PyTorch: same weights, batches and losses.

The stored numbers and how to make them again: golden/transformers_finetune.py.
"""

import json
import pathlib

import hugging_face
import jax
import numpy as np
import pytest
from golden import finetune_data

from bertjax import heads, model, objectives, optim, sharding, state, step

STORED = pathlib.Path(__file__).parent / 'golden' / 'transformers_finetune.json'


@pytest.fixture(scope='module')
def stored():
  return json.loads(STORED.read_text(encoding='utf-8'))


def train(kind: str) -> dict[str, np.ndarray]:
  """The series of transformers_finetune.py, by bertjax's own jitted step."""
  mesh = sharding.make_mesh(sharding.MeshSettings(), jax.devices()[:1])
  settings = optim.OptimizerSettings(**finetune_data.OPTIMIZER)
  head = heads.HeadConfig(kind, finetune_data.KINDS[kind], dropout=0.0)
  config = model.BertConfig(**finetune_data.CONFIG)
  graphdef, shapes = state.split(lambda rngs: heads.HEADS[kind](config, head, rngs))
  optimizer = optim.make(settings, shapes)
  with jax.set_mesh(mesh):
    like = state.abstract(shapes, optimizer, mesh)
    params = hugging_face.fill(shapes, finetune_data.weights(kind))
    current = state.from_params(params, optimizer, like)
    jitted = step.jit_train_step(
        step.TrainStep(graphdef, objectives.fine_tuning(kind), optimizer, settings), like)
    metrics = []
    for batch in finetune_data.batches(kind):
      batch = jax.device_put(batch, sharding.batch_sharding(mesh))
      current, values = jitted(current, batch)
      metrics.append(jax.device_get(values))
  return {'loss': np.array([m[f'{kind}_loss_sum'] / m[f'{kind}_weight'] for m in metrics]),
          'grad_norm': np.array([m['grad_norm'] for m in metrics])}


def test_the_stored_losses_belong_to_these_weights_and_batches(stored):
  now = {'config': finetune_data.CONFIG, 'optimizer': finetune_data.OPTIMIZER,
         'data_sha256': finetune_data.digest()}
  assert {name: stored[name] for name in now} == now, 'run golden/transformers_finetune.py again'


@pytest.mark.parametrize('kind', finetune_data.KINDS)
def test_the_stored_losses_exercise_the_step(stored, kind):
  """They fall, for something is learnt, and some gradients are clipped."""
  losses, norms = np.array(stored[kind]['loss']), np.array(stored[kind]['grad_norm'])
  assert len(losses) == 100 and losses[-5:].mean() < 0.8 * losses[:5].mean()
  assert norms.max() > 1.2 * finetune_data.OPTIMIZER['clip_norm']


@pytest.mark.slow
@pytest.mark.parametrize('kind', finetune_data.KINDS)
def test_losses_of_100_steps_follow_transformers(stored, kind):
  """The promise is 1e-3 for the losses; rounding moves them by 2e-4 at the most (choice)."""
  for name, ours in train(kind).items():
    np.testing.assert_allclose(ours, stored[kind][name], rtol=1e-3, err_msg=name)
