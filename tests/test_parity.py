"""Fifty optimizer steps against Transformers' PyTorch BERT: same weights, batches and losses.

The stored numbers and how to make them again: golden/transformers_losses.py.
"""

import json
import pathlib

import hugging_face
import jax
import numpy as np
import pytest
from golden import parity_data

from bertjax import heads, model, objectives, optim, sharding, state, step

STORED = pathlib.Path(__file__).parent / 'golden' / 'transformers_losses.json'
SERIES = {'bias_correction': True, 'google': False}


@pytest.fixture(scope='module')
def stored():
  return json.loads(STORED.read_text(encoding='utf-8'))


def train(settings: optim.OptimizerSettings) -> dict[str, np.ndarray]:
  """The series of transformers_losses.py, by bertjax's own jitted step."""
  mesh = sharding.make_mesh(sharding.MeshSettings(), jax.devices()[:1])
  build = lambda rngs: heads.BertForPreTraining(model.BertConfig(**parity_data.CONFIG), rngs)
  graphdef, shapes = state.split(build)
  optimizer = optim.make(settings, shapes)
  batches = parity_data.batches()
  with jax.set_mesh(mesh):
    like = state.abstract(shapes, optimizer, mesh)
    params = hugging_face.fill(shapes, parity_data.weights())
    current = state.from_params(params, optimizer, like)
    jitted = step.jit_train_step(
        step.TrainStep(graphdef, objectives.PRETRAINING, optimizer, settings), like)
    metrics = []
    for index in range(settings.num_steps):
      batch = jax.device_put(batches[index % len(batches)], sharding.batch_sharding(mesh))
      current, values = jitted(current, batch)
      metrics.append(jax.device_get(values))
  series = {name: np.array([values[f'{name}_loss_sum'] / values[f'{name}_weight']
                            for values in metrics]) for name in ('masked_lm', 'next_sentence')}
  return series | {'total': series['masked_lm'] + series['next_sentence'],
                   'grad_norm': np.array([values['grad_norm'] for values in metrics])}


def test_the_stored_losses_belong_to_these_weights_and_batches(stored):
  now = {'config': parity_data.CONFIG, 'optimizer': parity_data.OPTIMIZER,
         'data_sha256': parity_data.digest()}
  assert {name: stored[name] for name in now} == now, 'run golden/transformers_losses.py again'


@pytest.mark.parametrize('kind', SERIES)
def test_the_stored_losses_exercise_the_step(stored, kind):
  """They fall, gradients are clipped, and neither rule could be taken for the other."""
  total, norms = np.array(stored[kind]['total']), np.array(stored[kind]['grad_norm'])
  assert len(total) == 50 and total[-5:].mean() < 0.8 * total[:5].mean()
  assert norms.max() > 2 * parity_data.OPTIMIZER['clip_norm']
  other, = (stored[name]['total'] for name in SERIES if name != kind)
  assert np.abs(total / other - 1).max() > 0.1


@pytest.mark.parametrize('kind', SERIES)
def test_losses_of_50_steps_follow_transformers(stored, kind):
  """The promise is 1e-3, but a lost weight decay moves some of these losses by 3e-4 only.

  Rounding moves them by about 1e-5 at the most.
  """
  settings = optim.OptimizerSettings(**parity_data.OPTIMIZER, bias_correction=SERIES[kind])
  for name, ours in train(settings).items():
    np.testing.assert_allclose(ours, stored[kind][name], rtol=1e-4, err_msg=name)
