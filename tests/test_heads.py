"""The fine-tuning heads against Transformers' (golden/02_heads), and what they promise."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hugging_face import fill
from safetensors import numpy as safetensors

from bertjax import dropout, heads, objectives, optim, sharding, state, step
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
      graphdef, objectives.fine_tuning(kind), optimizer, ADAMW))
  for number, wanted in enumerate(outputs['adamw_losses'][:3]):
    current, metrics = train_step(current, batch_of(folder, f't{number}'))
    loss = metrics[f'{kind}_loss_sum'] / metrics[f'{kind}_weight']
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
  wanted = filled(dict(np.load(folder / 'adamw_params_after_3.npz')))
  for tree in (wanted, current.params):
    _without_noise(tree, name)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
               jax.device_get(current.params), wanted)


# --- What heads promise, on a tiny model ----------------------------------------------------------

TINY = BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
DROPPING = dataclasses.replace(TINY, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
KINDS = {'classification': 3, 'regression': 1, 'multi_label': 4, 'choice': 1, 'tagging': 5,
         'span': 2}


def drawn(shapes, seed=0):
  """Weights by NumPy, large enough to tell rows apart."""
  draw = np.random.default_rng(seed)
  return jax.tree.map(
      lambda leaf: jnp.asarray(0.3 * draw.normal(size=leaf.shape), leaf.dtype), shapes)


def tiny(kind, config=TINY, **head):
  """graphdef and parameters; no dropout in the head unless it is asked for."""
  graphdef, shapes = state.split(build_of(config, kind, KINDS[kind], **{'dropout': 0.0} | head))
  return graphdef, drawn(shapes)


def tiny_batch(kind, rows=8, length=12, seed=0):
  """Rows of unequal lengths, of which the last one is a filler."""
  draw = np.random.default_rng(seed)
  shape = (rows, 4, length) if kind == 'choice' else (rows, length)
  lengths = draw.integers(3, length + 1, rows)
  lengths[-1] = 0
  used = np.arange(length) < lengths[:, None]
  mask = np.broadcast_to(used[:, None] if kind == 'choice' else used, shape).astype(np.int32)
  batch = {
      'input_ids': draw.integers(5, 60, shape).astype(np.int32) * mask,
      'token_type_ids': draw.integers(0, 2, shape).astype(np.int32) * mask,
      'attention_mask': mask, 'weights': (lengths > 0).astype(np.float32)}
  if kind == 'span':
    batch |= {name: draw.integers(0, np.maximum(lengths, 1)).astype(np.int32)
              for name in ('start_positions', 'end_positions')}
  elif kind == 'tagging':
    batch['labels'] = draw.integers(0, 5, shape).astype(np.int32)
    # Very unequal numbers of labels: a mean of means would be wrong (B050).
    batch['label_weights'] = used * (draw.random(shape) < np.linspace(0, 1, rows)[:, None]).astype(
        np.float32)
  else:
    batch['labels'] = {
        'classification': draw.integers(0, 3, rows).astype(np.int32),
        'regression': draw.normal(size=rows).astype(np.float32),
        'multi_label': draw.integers(0, 2, (rows, 4)).astype(np.float32),
        'choice': draw.integers(0, 4, rows).astype(np.int32)}[kind]
  return {name: jnp.asarray(array) for name, array in batch.items()}


@functools.partial(jax.jit, static_argnums=0)
def call(graphdef, params, batch, keys=None):
  return nnx.merge(graphdef, params)(
      batch['input_ids'], batch['token_type_ids'], batch['attention_mask'], keys)


def keys_of(rows, seed=0):
  return dropout.row_keys(seed, jnp.int32(3), rows)


@pytest.mark.parametrize('kind', ['classification', 'tagging'])
def test_the_layer_of_a_task_is_drawn_from_the_whole_normal_distribution(kind):
  params = state.init_params(build_of(TINY, kind, 1000), 0)
  kernel = np.asarray(params['classifier']['kernel'])
  assert abs(kernel.std() / TINY.initializer_range - 1) < 0.03
  assert abs(kernel).max() > 3 * TINY.initializer_range
  encoder = np.asarray(params['bert']['embeddings']['word_embeddings']['embedding'])
  assert abs(encoder).max() <= 2 * TINY.initializer_range  # as Google's


@pytest.mark.parametrize('kind', ['classification', 'choice', 'tagging'])
def test_the_head_drops_in_training_only(kind):
  graphdef, params = tiny(kind, dropout=0.5)
  batch = tiny_batch(kind)
  calm = call(graphdef, params, batch)
  np.testing.assert_array_equal(calm, call(graphdef, params, batch))
  plain, _ = tiny(kind, dropout=0.0)
  np.testing.assert_array_equal(calm, call(plain, params, batch))  # evaluation knows no rate
  first, other = (call(graphdef, params, batch, keys_of(8, seed)) for seed in (0, 1))
  assert not np.allclose(first, calm, atol=1e-3) and not np.allclose(first, other, atol=1e-3)
  np.testing.assert_array_equal(first, call(graphdef, params, batch, keys_of(8)))
  np.testing.assert_array_equal(call(plain, params, batch, keys_of(8)), calm)


def test_before_a_span_nothing_is_dropped():
  """As in Google's run_squad.py."""
  graphdef, params = tiny('span', dropout=0.5)
  batch = tiny_batch('span')
  np.testing.assert_array_equal(
      call(graphdef, params, batch, keys_of(8)), call(graphdef, params, batch))


def test_every_choice_has_a_dropout_of_its_own():
  """Equal endings get equal scores in evaluation, and different ones in training."""
  graphdef, params = tiny('choice', DROPPING, dropout=0.1)
  batch = tiny_batch('choice')
  for name in ('input_ids', 'token_type_ids', 'attention_mask'):
    batch[name] = jnp.repeat(batch[name][:, :1], 4, axis=1)
  calm = np.asarray(call(graphdef, params, batch))[:-1]
  np.testing.assert_allclose(calm, calm[:, :1].repeat(4, 1), atol=1e-6)
  dropped = np.asarray(call(graphdef, params, batch, keys_of(8)))[:-1]
  assert all(len(set(row)) == 4 for row in dropped.round(5).tolist())


@pytest.mark.parametrize('kind', ['classification', 'span'])
def test_weights_of_zero_are_the_mean_of_all_layers(kind):
  graphdef, params = tiny(kind, layers='weighted_sum')
  assert params['layer_weights'].shape == (3,)  # the embeddings' output and two layers
  batch = tiny_batch(kind)
  head = 'qa_outputs' if kind == 'span' else 'classifier'

  def by_hand(params, weights):
    model = nnx.merge(graphdef, params)
    layers = model.bert.hidden_states(
        batch['input_ids'], batch['token_type_ids'], batch['attention_mask'])
    hidden = sum(weight * layer for weight, layer in zip(weights, layers, strict=True))
    pooled = hidden if kind == 'span' else jnp.tanh(model.bert.pooler(hidden[:, 0]))
    return getattr(model, head)(pooled)

  params['layer_weights'] = jnp.zeros(3)
  wanted = jax.jit(lambda params: by_hand(params, [1 / 3] * 3))(params)
  np.testing.assert_allclose(call(graphdef, params, batch), wanted, atol=1e-5)
  params['layer_weights'] = jnp.log(jnp.asarray([1.0, 2.0, 5.0]))
  wanted = jax.jit(lambda params: by_hand(params, [1 / 8, 2 / 8, 5 / 8]))(params)
  np.testing.assert_allclose(call(graphdef, params, batch), wanted, atol=1e-5)


def test_layer_weights_are_learned_though_the_encoder_is_frozen():
  """The feature-based use; they begin at zero."""
  build = build_of(TINY, 'tagging', 5, layers='weighted_sum')
  settings = dataclasses.replace(ADAMW, freeze='encoder')
  before, after, _ = trained('tagging', build, settings=settings)
  assert not np.asarray(before['layer_weights'] == after['layer_weights']).any()
  jax.tree.map(np.testing.assert_array_equal, after['bert'], before['bert'])
  fresh = nnx.to_pure_dict(nnx.state(build(nnx.Rngs(0)), nnx.Param))
  assert not fresh['layer_weights'].any()


@pytest.mark.parametrize('kind', KINDS)
def test_b066_neither_padding_nor_company_changes_the_outputs(kind):
  graphdef, params = tiny(kind)
  batch = tiny_batch(kind)
  together = np.asarray(call(graphdef, params, batch))
  longer = {name: jnp.pad(batch[name], [(0, 0)] * (batch[name].ndim - 1) + [(0, 9)])
            for name in ('input_ids', 'token_type_ids', 'attention_mask')}
  longer['input_ids'] += 7 * (1 - longer['attention_mask'])  # whatever the padding holds
  padded = np.asarray(call(graphdef, params, longer))
  others = {name: array[::-1] for name, array in longer.items()}
  others['input_ids'] = jnp.where(  # row 2 between other rows
      (jnp.arange(8) == 5).reshape(-1, *(1,) * (others['input_ids'].ndim - 1)),
      others['input_ids'], 11)
  lonely = np.asarray(call(graphdef, params, others))[5]
  for row in range(7):
    real = slice(int(batch['attention_mask'][row].sum())) if kind in ('tagging', 'span') else (
        slice(None))
    np.testing.assert_allclose(padded[row][real], together[row][real], atol=1e-5)
    if row == 2:
      np.testing.assert_allclose(lonely[real], together[row][real], atol=1e-5)
  assert np.isfinite(together).all()  # the filler's row as well


def trained(kind, build, *, settings=None, data=1, fsdp=1, accumulate=1, steps=2):
  """Parameters before and after some steps, and the metrics of each step."""
  # With so large an eps a gradient of 0, as of a bias that a softmax does not see, stays no step.
  settings = settings or dataclasses.replace(ADAMW, clip_norm=1.0, eps=1e-4)
  mesh = sharding.make_mesh(sharding.MeshSettings(data, fsdp), jax.devices()[:data * fsdp])
  graphdef, shapes = state.split(build)
  optimizer, before = optim.make(settings, shapes), drawn(shapes)
  with jax.set_mesh(mesh):
    like = state.abstract(shapes, optimizer, mesh)
    current = state.from_params(jax.device_get(before), optimizer, like)
    train_step = step.jit_train_step(step.TrainStep(
        graphdef, objectives.fine_tuning(kind), optimizer, settings, accumulate), like)
    metrics = []
    for seed in range(steps):
      batch = jax.device_put(tiny_batch(kind, seed=seed), sharding.batch_sharding(mesh))
      current, values = train_step(current, batch)
      metrics.append(jax.device_get(values))
  return before, jax.device_get(current.params), metrics


@pytest.fixture(scope='module')
def alone():
  """Two steps of each kind on one device, dropout on, made when they are asked for."""
  return functools.cache(lambda kind: trained(kind, dropping(kind)))


def dropping(kind):
  return build_of(DROPPING, kind, KINDS[kind], dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_b050_devices_and_parts_change_neither_losses_nor_weights(alone, kind):
  """A filler is among the rows, labels are spread unevenly, and dropout is on."""
  _, wanted, wanted_metrics = alone(kind)
  before, found, metrics = trained(kind, dropping(kind), accumulate=4, data=2)
  for one, other in zip(metrics, wanted_metrics, strict=True):
    assert one.keys() == other.keys()
    for name in one:
      np.testing.assert_allclose(one[name], other[name], rtol=5e-5, err_msg=name)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, wanted)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), found, jax.device_get(before))
  assert moved['bert']['encoder']['layers']['output']['kernel'] > 1e-3


@pytest.mark.parametrize('change, message', [
    ({'kind': 'ranking'}, "head kind 'ranking' is not one of classification"),
    ({'num_outputs': 0}, 'there must be at least 1'), ({'dropout': 1.0}, 'head dropout is 1.0'),
    ({'layers': 'first'}, "head layers 'first' is neither")])
def test_heads_that_cannot_be_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    heads.HeadConfig(**{'kind': 'classification', 'num_outputs': 2} | change)
