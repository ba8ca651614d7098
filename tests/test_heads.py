"""The fine-tuning heads against Transformers' (golden/02_heads), and what they promise."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hugging_face import fill
from safetensors import numpy as safetensors

from bertjax import heads, objectives, optim, state, step
from bertjax.evals import predictions
from bertjax.model import BertConfig

# Folder in golden/02_heads -> kind and number of outputs.
GOLDEN = {
    'seqcls': ('classification', 3),
    'seqreg': ('regression', 1),
    'seqmulti': ('multi_label', 4),
    'tokcls': ('tagging', 5),
    'qa': ('span', 2),
    'mc': ('choice', 1),
}
ADAMW = optim.OptimizerSettings(  # what golden/README.md says of adamw_params_after_3
    learning_rate=1e-3, warmup_steps=0, num_steps=10**9, power=0.0, eps=1e-8, weight_decay=0.01,
    bias_correction=True, clip_norm=0.0)


def build_of(config, kind, num_outputs, **head):
  settings = heads.HeadConfig(kind, num_outputs, **head)
  return lambda rngs: heads.HEADS[kind](config, settings, rngs)


def load_golden(folder):
  """Config, parameters (a function of a tensor file's content) and graphdef of a golden model."""
  stored = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  fields = {field.name for field in dataclasses.fields(BertConfig)}
  config = BertConfig(**{k: v for k, v in stored.items() if k in fields} | {
      'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0, 'dtype': 'float32'})
  build = build_of(config, *GOLDEN[folder.name], dropout=0.0)
  graphdef, shapes = state.split(build)
  return graphdef, shapes, lambda tensors: fill(shapes, tensors)


def batch_of(folder, name):
  """A golden batch with our weights: -100 is a token without a label."""
  stored = np.load(folder / 'batches.npz')
  batch = {key.split('/')[1]: jnp.asarray(stored[key]) for key in stored.files
           if key.startswith(f'{name}/')}
  batch['weights'] = jnp.ones(len(batch['input_ids']), jnp.float32)
  if folder.name == 'tokcls':
    batch['label_weights'] = (batch['labels'] != -100).astype(jnp.float32)
    batch['labels'] = jnp.where(batch['labels'] == -100, 0, batch['labels'])
  return batch


def logits_of(folder, name):
  stored = np.load(folder / 'outputs.npz')
  if folder.name == 'qa':
    return np.stack([stored[f'{name}/start_logits'], stored[f'{name}/end_logits']], -1)
  return stored[f'{name}/logits']


@pytest.mark.parametrize('name', GOLDEN)
def test_logits_and_losses_are_transformers(golden, name):
  folder = golden / '02_heads' / name
  graphdef, _, filled = load_golden(folder)
  params = filled(safetensors.load_file(folder / 'model.safetensors'))
  kind, outputs = GOLDEN[name][0], np.load(folder / 'outputs.npz')
  objective = objectives.fine_tuning(kind)
  evaluate = step.jit_eval_step(graphdef, objective)
  names = ['t0', 't1', 't2'] + (['oor'] if name == 'qa' else [])
  for part in names:
    batch = batch_of(folder, part)
    found, *_ = predictions.jit_outputs(graphdef, kind, with_loss=False)(params, batch)
    used = np.asarray(batch['attention_mask'])
    wanted = logits_of(folder, part)
    if name in ('tokcls', 'qa'):  # what stands at padding is nobody's
      found, wanted = np.asarray(found)[used > 0], wanted[used > 0]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    sums = evaluate(params, batch)
    loss = sums[f'{kind}_loss_sum'] / sums[f'{kind}_weight']
    np.testing.assert_allclose(loss, outputs[f'{part}/loss'], rtol=1e-5)


def _without_noise(tree, name):
  """Takes out what need not agree.

  A softmax does not see what is added to all of its inputs: these biases have a gradient of 0, of
  whose rounding noise Adam makes whole steps. And torch's embedding never moves the row of [PAD],
  which has a gradient in Google's code and here where padding takes part in the softmax over spans.
  """
  zero = np.zeros(())
  tree['bert']['encoder']['layers']['attention']['key']['bias'] = zero
  if name == 'mc':
    tree['classifier']['bias'] = zero
  if name == 'qa':
    tree['qa_outputs']['bias'] = zero
    norm = tree['bert']['encoder']['layers']['output_layer_norm']
    norm['bias'] = np.asarray(norm['bias'])[:-1]  # of the last layer: added to every position
  words = tree['bert']['embeddings']['word_embeddings']
  words['embedding'] = np.asarray(words['embedding'])[1:]


def _still_pad_row(optimizer):
  """The optimizer without the gradient of the row of [PAD], as torch has it."""
  def update(grads, opt_state, params, **extra):
    words = grads['bert']['embeddings']['word_embeddings']
    words['embedding'] = words['embedding'].at[0].set(0)
    return optimizer.update(grads, opt_state, params, **extra)

  return optax.GradientTransformationExtraArgs(optimizer.init, update)


@pytest.mark.parametrize('name', GOLDEN)
def test_gradients_are_transformers(golden, name):
  folder = golden / '02_heads' / name
  graphdef, _, filled = load_golden(folder)
  params = filled(safetensors.load_file(folder / 'model.safetensors'))
  head = objectives.FINE_TUNING[GOLDEN[name][0]]

  def loss(params, batch):
    sums = head.sums(head.outputs(nnx.merge(graphdef, params), batch, None), batch)
    return sums.loss / sums.weight

  found = jax.device_get(jax.jit(jax.grad(loss))(params, batch_of(folder, 't0')))
  wanted = filled(dict(np.load(folder / 'grads_t0.npz')))
  _without_noise(found, name)
  _without_noise(wanted, name)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


@pytest.mark.parametrize('name', GOLDEN)
def test_three_adamw_steps_are_torch(golden, name):
  folder = golden / '02_heads' / name
  graphdef, shapes, filled = load_golden(folder)
  kind, outputs = GOLDEN[name][0], np.load(folder / 'outputs.npz')
  optimizer = _still_pad_row(optim.make(ADAMW, shapes))
  params = filled(safetensors.load_file(folder / 'model.safetensors'))
  current = state.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
  train_step = jax.jit(step.TrainStep(
      graphdef, objectives.fine_tuning(kind), optimizer, ADAMW, seed=0))
  for number, wanted in enumerate(outputs['adamw_losses'][:3]):
    current, metrics = train_step(current, batch_of(folder, f't{number}'))
    loss = metrics[f'{kind}_loss_sum'] / metrics[f'{kind}_weight']
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
  wanted = filled(dict(np.load(folder / 'adamw_params_after_3.npz')))
  for tree in (wanted, current.params):
    _without_noise(tree, name)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
               jax.device_get(current.params), wanted)
