"""The optimizer: Google's and PyTorch's trajectories, schedule, clipping, decay by path."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bertjax import optim

# The settings of golden/03_optim, and the names there.
GOOGLE = optim.OptimizerSettings(
    learning_rate=5e-3, warmup_steps=4, num_steps=20, decay_exclude=('LayerNorm', 'bias')
)


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


def arrays(file, kind):
  """{name: array} of the entries `kind`/name of an npz file."""
  with np.load(file) as stored:
    return {name[2:]: stored[name] for name in stored.files if name.startswith(f'{kind}/')}


def tree_of(names_to_arrays, dtype):
  return {name: jnp.asarray(array, dtype) for name, array in names_to_arrays.items()}


@functools.partial(jax.jit, static_argnums=0)
def update(settings, params, state, grads):
  rate = optim.learning_rate(settings, state)
  updates, state = optim.make(settings, params).update(grads, state, params)
  return optax.apply_updates(params, updates), state, rate


def trajectory(settings, inputs, dtype):
  """Parameters, state and rate after each update; one settings for all steps, or one for each."""
  settings = settings if isinstance(settings, list) else [settings] * 20
  params = tree_of(arrays(inputs, 'p'), dtype)
  grads = arrays(inputs, 'g')
  state = optim.make(settings[0], params).init(params)
  for i in range(20):
    grad = tree_of({name: g[i] for name, g in grads.items()}, dtype)
    params, state, rate = update(settings[i], params, state, grad)
    yield params, state, rate


def test_google_adamw_in_float64(golden, float64):
  folder = golden / '03_optim'
  expected = folder / 'google_adamw.npz'
  params, mu, nu = (arrays(expected, kind) for kind in 'pmv')
  rates = np.load(expected)['lr']
  steps = trajectory(GOOGLE, folder / 'inputs.npz', jnp.float64)
  for i, (ours, state, rate) in enumerate(steps):
    np.testing.assert_allclose(rate, rates[i], rtol=1e-14)
    for name in params:
      np.testing.assert_allclose(ours[name], params[name][i], rtol=1e-12, atol=1e-14)
      np.testing.assert_allclose(state[1].mu[name], mu[name][i], rtol=1e-12, atol=1e-16)
      np.testing.assert_allclose(state[1].nu[name], nu[name][i], rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize('file', ['google_adamw.npz', 'google_adamw_tf_float32.npz'])
def test_google_adamw_in_float32(golden, file):
  folder = golden / '03_optim'
  expected = arrays(folder / file, 'p')
  rates = np.load(folder / file)['lr']
  steps = trajectory(GOOGLE, folder / 'inputs.npz', jnp.float32)
  for i, (ours, _, rate) in enumerate(steps):
    np.testing.assert_allclose(rate, rates[i], rtol=1e-6)
    for name in expected:
      np.testing.assert_allclose(ours[name], expected[name][i], rtol=1e-6, atol=1e-6)


def test_torch_adamw_with_a_constant_rate(golden, float64):
  folder = golden / '03_optim'
  expected = arrays(folder / 'adamw_torch_const_lr_1e-3.npz', 'p')
  settings = optim.OptimizerSettings(
      learning_rate=1e-3, warmup_steps=0, num_steps=20, power=0.0, bias_correction=True, eps=1e-8,
      clip_norm=0.0, decay_exclude=GOOGLE.decay_exclude,
  )
  for i, (ours, _, _) in enumerate(trajectory(settings, folder / 'inputs.npz', jnp.float64)):
    for name in expected:
      np.testing.assert_allclose(ours[name], expected[name][i], rtol=1e-11, atol=1e-12)


def test_torch_adamw_with_clipping_and_the_rate_of_hugging_face(golden, float64):
  folder = golden / '03_optim'
  expected = arrays(folder / 'adamw_torch_hf_linear_clip.npz', 'p')
  rates = json.loads((folder / 'schedules.json').read_text(encoding='utf-8'))
  rates = rates['lr0.005_w4_t20']['hf_linear']
  # Power 0 keeps a rate, so each step is given Hugging Face's (whose decay starts at the peak).
  settings = [
      dataclasses.replace(
          GOOGLE, learning_rate=rate, warmup_steps=0, power=0.0, bias_correction=True, eps=1e-8
      )
      for rate in rates[:20]
  ]
  # PyTorch divides by norm + 1e-6, so scales agree to 1e-6.
  for i, (ours, _, _) in enumerate(trajectory(settings, folder / 'inputs.npz', jnp.float64)):
    for name in expected:
      np.testing.assert_allclose(ours[name], expected[name][i], rtol=1e-6, atol=1e-6)


def test_schedules_of_google(golden, float64):
  cases = json.loads((golden / '03_optim' / 'schedules.json').read_text(encoding='utf-8'))
  seen = 0
  for case in cases.values():
    for key, power in [
        ('google_linear', 1.0), ('google_poly_power0.5', 0.5), ('google_poly_power2', 2.0)
    ]:
      if f'{key}_f64' not in case:
        continue
      settings = optim.OptimizerSettings(
          learning_rate=case['lr'], warmup_steps=case['warmup'], num_steps=case['total'],
          power=power,
      )
      steps = jnp.asarray(case['steps'], jnp.int32)
      rates = jax.vmap(optim.schedule(settings))(steps)
      # The reference computes 1 - step / total, which has 1e-16 of rounding whatever its size.
      atol = case['lr'] * 1e-15 if power >= 1 else 0
      np.testing.assert_allclose(rates, case[f'{key}_f64'], rtol=1e-9, atol=atol)
      seen += 1
  assert seen >= 12


@pytest.mark.parametrize('warmup_steps', [0, 3])
def test_schedule_in_float32_at_every_step(warmup_steps):
  settings = optim.OptimizerSettings(
      learning_rate=2e-3, warmup_steps=warmup_steps, num_steps=12, end_learning_rate=1e-4
  )
  rate = jax.jit(optim.schedule(settings))
  for step in range(16):
    expected = 1e-4 + (2e-3 - 1e-4) * (1 - min(step, 12) / 12)
    if step < warmup_steps:
      expected = 2e-3 * step / warmup_steps
    np.testing.assert_allclose(rate(jnp.int32(step)), expected, rtol=1e-6)


def test_clip_against_tensorflow(golden):
  file = golden / '03_optim' / 'clip_by_global_norm.json'
  for name, case in json.loads(file.read_text(encoding='utf-8')).items():
    grads = [jnp.asarray(g, jnp.float32) for g in case['grads']]
    norm = optim.global_norm(grads)
    clipped = optim.clip(grads, norm, 1.0)
    np.testing.assert_allclose(norm, case['tf_norm'], rtol=1e-6)
    if name == 'huge':  # a norm that overflows: the alarm stops the run, nothing is promised here
      continue
    for ours, theirs in zip(clipped, case['tf'], strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_short_gradients_are_not_touched():
  grads = {'a': jnp.asarray([0.6, 0.8]), 'b': jnp.zeros((2, 2))}
  clipped = optim.clip(grads, optim.global_norm(grads), 1.0)
  assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), grads, clipped))


def test_the_norm_that_is_given_is_the_one_used():
  settings = optim.OptimizerSettings(warmup_steps=0, decay_exclude=(), weight_decay=0.0)
  params = {'kernel': jnp.ones(3)}
  tx = optim.make(settings, params)
  state = tx.init(params)
  grads = {'kernel': jnp.asarray([3.0, 0.0, 4.0])}
  with_norm = tx.update(grads, state, params, grad_norm=jnp.float32(5))
  without = tx.update(grads, state, params)
  jax.tree.map(np.testing.assert_array_equal, with_norm, without)
  other = tx.update(grads, state, params, grad_norm=jnp.float32(50))
  np.testing.assert_allclose(other[1][1].mu['kernel'], with_norm[1][1].mu['kernel'] / 10, rtol=1e-6)


def bert_params(value=1.0):
  """The paths of the pre-training model, with small leaves."""
  dense = {'kernel': jnp.full((2, 2), value), 'bias': jnp.full((2,), value)}
  norm = {'scale': jnp.full((2,), value), 'bias': jnp.full((2,), value)}
  table = {'embedding': jnp.full((4, 2), value)}
  return {
      'embeddings': {
          'word_embeddings': table, 'position_embeddings': table, 'token_type_embeddings': table,
          'layer_norm': norm,
      },
      'encoder': {'layers': {
          'attention': dict.fromkeys(('query', 'key', 'value', 'output'), dense)
          | {'layer_norm': norm},
          'intermediate': dense, 'output': dense, 'output_layer_norm': norm,
      }},
      'pooler': dense,
      'masked_lm': {'dense': dense, 'layer_norm': norm, 'bias': jnp.full((4,), value)},
      'next_sentence': dense,
  }


def paths(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def test_b054_bias_correction_is_a_switch():
  params = {'kernel': jnp.full((), 2.0)}
  grads = {'kernel': jnp.full((), 0.01)}
  for corrected, expected in [(False, 3.15), (True, 1.0)]:
    for decay in (0.0, 0.5):
      settings = optim.OptimizerSettings(
          learning_rate=1e-3, warmup_steps=0, bias_correction=corrected, weight_decay=decay,
          decay_exclude=(),
      )
      tx = optim.make(settings, params)
      updates, _ = tx.update(grads, tx.init(params), params)
      # The decay is decoupled: rate * decay * weight on top of the same Adam update.
      np.testing.assert_allclose(
          -updates['kernel'] / 1e-3, expected + decay * 2.0, rtol=4e-3
      )
  assert optim.OptimizerSettings().bias_correction is False


def test_b055_exactly_the_exempt_leaves_do_not_decay():
  params = bert_params()
  settings = optim.OptimizerSettings(learning_rate=1.0, warmup_steps=0, weight_decay=0.1)
  tx = optim.make(settings, jax.eval_shape(lambda: params))
  updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
  after = paths(optax.apply_updates(params, updates))
  assert len(after) == 30
  for path, leaf in after.items():
    if path.split('/')[-1] in ('kernel', 'embedding'):
      np.testing.assert_allclose(leaf, 0.9, rtol=1e-6)
    else:
      assert path.split('/')[-1] in ('bias', 'scale')
      assert (leaf == 1).all(), path


def test_b055_a_pattern_that_matches_nothing_is_refused():
  settings = optim.OptimizerSettings(decay_exclude=('bias$', 'LayerNorm/gamma'))
  with pytest.raises(ValueError, match='LayerNorm/gamma.*matches none of the 30 parameters'):
    optim.make(settings, bert_params())


def test_b057_the_logged_rate_is_the_applied_rate():
  # Adam of a constant gradient with b1 = b2 = 0 moves by the rate itself, like plain descent.
  params = {'kernel': jnp.zeros(())}
  settings = optim.OptimizerSettings(
      learning_rate=0.5, warmup_steps=3, num_steps=10, b1=0.0, b2=0.0, eps=1e-12,
      weight_decay=0.0, decay_exclude=(),
  )
  tx = optim.make(settings, params)
  state = tx.init(params)
  logged = []
  for _ in range(12):
    logged.append(float(optim.learning_rate(settings, state)))
    updates, state = tx.update({'kernel': jnp.ones(())}, state, params)
    np.testing.assert_allclose(-updates['kernel'], logged[-1], rtol=1e-6)
  assert logged[0] == 0
  assert max(logged) == pytest.approx(0.35)
  assert logged[10] == logged[11] == 0


@pytest.mark.parametrize('bias_correction', [False, True])
def test_b058_state_written_and_read_back_continues_the_same(bias_correction):
  settings = dataclasses.replace(GOOGLE, bias_correction=bias_correction, decay_exclude=())
  rng = np.random.default_rng(0)
  params = {'kernel': jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)}
  grads = [{'kernel': jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)} for _ in range(20)]

  def run(params, state, grads):
    rates = []
    for grad in grads:
      params, state, rate = update(settings, params, state, grad)
      rates.append(float(rate))
    return params, state, rates

  state = optim.make(settings, params).init(params)
  straight = run(params, state, grads)
  first = run(params, state, grads[:7])
  numpy = jax.tree.map(np.asarray, first[:2])  # what a checkpoint holds
  second = run(*jax.tree.map(jnp.asarray, numpy), grads[7:])
  assert first[2] + second[2] == straight[2]
  jax.tree.map(np.testing.assert_array_equal, second[:2], straight[:2])


def test_restart_for_a_new_phase():
  params = {'kernel': jnp.zeros(2)}
  settings = dataclasses.replace(GOOGLE, decay_exclude=())
  tx = optim.make(settings, params)
  state = tx.init(params)
  fresh = state
  for _ in range(6):
    _, state = tx.update({'kernel': jnp.ones(2)}, state, params)
  assert optim.learning_rate(settings, state) > 0
  carried = optim.restart(state, schedule=True)
  assert jax.tree.structure(carried) == jax.tree.structure(state)
  assert optim.learning_rate(settings, carried) == 0
  assert (carried[1].mu['kernel'] == state[1].mu['kernel']).all()
  assert carried[1].count == 6
  forgotten = optim.restart(state, moments=True)
  assert (forgotten[1].mu['kernel'] == 0).all()
  assert optim.learning_rate(settings, forgotten) == optim.learning_rate(settings, state)
  both = optim.restart(state, moments=True, schedule=True)
  jax.tree.map(np.testing.assert_array_equal, both, fresh)
  jax.tree.map(np.testing.assert_array_equal, optim.restart(state), state)


def test_moments_have_the_paths_of_their_parameters():
  params = bert_params()
  states = [
      jax.eval_shape(optim.make(optim.OptimizerSettings(bias_correction=switch), params).init,
                     params)
      for switch in (False, True)
  ]
  assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
  leaves = paths(states[0])
  for path, leaf in paths(params).items():
    moments = [p for p in leaves if p.endswith(f'/{path}') and leaves[p].shape == leaf.shape]
    assert len([p for p in moments if 'mu' in p]) == 1 or path == 'bias'
    assert any('nu' in p for p in moments)
  counts = [leaf for leaf in leaves.values() if leaf.shape == ()]
  assert len(counts) == 2
  assert len(leaves) == 2 * 30 + 2


def test_the_optimizer_learns():
  params = {'kernel': jnp.asarray([1.0, -2.0, 3.0])}
  settings = optim.OptimizerSettings(
      learning_rate=0.1, warmup_steps=10, num_steps=200, decay_exclude=()
  )
  tx = optim.make(settings, params)
  state = tx.init(params)
  for _ in range(200):
    grads = jax.tree.map(lambda x: 2 * (x - 0.5), params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_allclose(params['kernel'], 0.5, atol=0.02)


@pytest.mark.parametrize(('change', 'message'), [
    ({'name': 'adagrad'}, "optimizer name is 'adagrad'"),
    ({'num_steps': 0}, 'num_steps'),
    ({'warmup_steps': 21}, 'warmup_steps is 21; it must lie between 0 and the 20'),
    ({'warmup_steps': -1}, 'warmup_steps'),
    ({'learning_rate': -1e-4}, 'learning_rate'),
    ({'learning_rate': float('nan')}, 'learning_rate'),
    ({'clip_norm': float('inf')}, 'clip_norm'),
    ({'b2': 1.0}, 'b2 is 1.0'),
    ({'eps': 0.0}, 'eps'),
])
def test_impossible_settings_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(GOOGLE, **change)


# --- Rates by layer, and what is frozen -----------------------------------------------------------


def layered_params(num_layers=3, seed=0):
  """The paths of a classifier on an encoder of some layers, with small leaves that all differ."""
  draw = np.random.default_rng(seed)
  leaf = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)
  dense = lambda *stack: {'kernel': leaf(*stack, 2, 2), 'bias': leaf(*stack, 2)}
  norm = lambda *stack: {'scale': leaf(*stack, 2), 'bias': leaf(*stack, 2)}
  return {
      'bert': {
          'embeddings': {'word_embeddings': {'embedding': leaf(4, 2)}, 'layer_norm': norm()},
          'encoder': {'layers': {
              'attention': {'query': dense(num_layers), 'layer_norm': norm(num_layers)},
              'output': dense(num_layers)}},
          'pooler': dense()},
      'classifier': dense(),
      'layer_weights': leaf(num_layers + 1),
  }


PLAIN = optim.OptimizerSettings(
    learning_rate=0.1, warmup_steps=0, num_steps=10, power=0.0, weight_decay=0.5, clip_norm=0.0)


def moved(settings, steps=3):
  """Parameters before and after some steps whose gradients are held as the train step holds
  them, and the norms of the gradients."""
  params = before = layered_params()
  tx = optim.make(settings, params)
  opt_state, norms = tx.init(params), []
  for _ in range(steps):
    loss = lambda p: sum(jnp.sum(jnp.sin(x + 1)) for x in jax.tree.leaves(optim.hold(settings, p)))
    grads = jax.grad(loss)(params)
    norms.append(float(optim.global_norm(grads)))
    updates, opt_state = tx.update(grads, opt_state, params, grad_norm=norms[-1])
    params = optax.apply_updates(params, updates)
  return paths(before), paths(params), norms


@pytest.mark.parametrize(('change', 'frozen', 'layers'), [
    ({'freeze': 'embeddings'}, ('embeddings/',), 0),
    ({'freeze_layers': 2}, ('embeddings/',), 2),
    ({'freeze_layers': 3}, ('embeddings/',), 3),
    ({'freeze': 'encoder'}, ('embeddings/', 'encoder/'), 3),
])
@pytest.mark.parametrize('layer_decay', [1.0, 0.5])
def test_what_is_frozen_stays_bit_for_bit_and_all_else_moves(change, frozen, layers, layer_decay):
  """Weight decay does not move it either; pooler, head and layer weights are never frozen."""
  before, after, _ = moved(dataclasses.replace(PLAIN, layer_decay=layer_decay, **change))
  for path, leaf in after.items():
    same = np.asarray(before[path] == leaf)
    if 'encoder/layers/' in path:
      assert same[:layers].all() and not same[layers:].any(), path
    else:
      assert same.all() if any(name in path for name in frozen) else not same.any(), path
  assert not any(np.asarray(before[path] == after[path]).any() for path in (
      'bert/pooler/kernel', 'classifier/kernel', 'classifier/bias', 'layer_weights'))


def test_the_gradient_norm_is_that_of_what_is_trained():
  """Else clipping would shorten the head's gradient by the length of one that is thrown away."""
  params = layered_params()
  squares = {path: (np.cos(np.asarray(leaf, float) + 1)**2)
             for path, leaf in paths(params).items()}
  total = lambda keep: np.sqrt(sum(
      s[keep:].sum() if 'encoder/layers/' in path else s.sum() * ('embeddings/' not in path)
      for path, s in squares.items()))
  for settings, layers in [(dataclasses.replace(PLAIN, freeze_layers=2), 2),
                           (dataclasses.replace(PLAIN, freeze='embeddings'), 0),
                           (dataclasses.replace(PLAIN, freeze='encoder'), 3)]:
    np.testing.assert_allclose(moved(settings, 1)[2], total(layers), rtol=1e-6)
  everything = np.sqrt(sum(s.sum() for s in squares.values()))
  np.testing.assert_allclose(moved(PLAIN, 1)[2], everything, rtol=1e-6)


def test_rate_of_each_layer():
  """The head 1, the last layer d, the one below d^2, ..., the embeddings as one more layer."""
  found = paths(optim.rate_multipliers(
      dataclasses.replace(PLAIN, layer_decay=0.5), layered_params()))
  for path, multiplier in found.items():
    wanted = 1.0
    if 'encoder/layers/' in path:
      wanted = [0.125, 0.25, 0.5]
    elif 'embeddings/' in path:
      wanted = 0.0625
    np.testing.assert_array_equal(np.ravel(multiplier), wanted, err_msg=path)


def test_layer_decay_scales_the_whole_update():
  """Adam does not see the size of a gradient: the rate itself must be smaller, and the decay's."""
  plain = moved(PLAIN, 1)
  slower = moved(dataclasses.replace(PLAIN, layer_decay=0.5), 1)
  multipliers = paths(optim.rate_multipliers(
      dataclasses.replace(PLAIN, layer_decay=0.5), layered_params()))
  assert plain[2] == slower[2]  # the gradients are the same
  for path, before in plain[0].items():
    step, small = plain[1][path] - before, slower[1][path] - before
    np.testing.assert_allclose(small, step * multipliers[path], rtol=2e-5, atol=1e-7)


def test_no_setting_changes_the_structure_of_the_state():
  """So a checkpoint of a frozen run is one of any run."""
  params = layered_params()
  shapes = lambda **change: jax.eval_shape(
      optim.make(dataclasses.replace(PLAIN, **change), params).init, params)
  plain = shapes()
  for change in ({'freeze': 'encoder'}, {'freeze_layers': 1}, {'layer_decay': 0.9},
                 {'clip_norm': 1.0}, {'freeze': 'embeddings', 'layer_decay': 0.5}):
    other = shapes(**change)
    assert jax.tree.structure(other) == jax.tree.structure(plain)
    assert jax.tree.leaves(other) == jax.tree.leaves(plain)


def test_nothing_is_computed_below_what_is_frozen():
  """No backward pass through a frozen encoder: its gradient is a constant zero."""
  params = layered_params()
  settings = dataclasses.replace(PLAIN, freeze='encoder')

  def loss(params):
    params = optim.hold(settings, params)
    x = params['bert']['embeddings']['word_embeddings']['embedding']
    for kernel in params['bert']['encoder']['layers']['output']['kernel']:
      x = jnp.tanh(x @ kernel)
    return jnp.sum(x @ params['classifier']['kernel'])

  program = str(jax.make_jaxpr(jax.grad(loss))(params))
  assert program.count('dot_general') == 3 + 1 + 1  # forward, and the head's own gradient


@pytest.mark.parametrize(('change', 'message'), [
    ({'freeze': 'head'}, "freeze is 'head'"),
    ({'freeze_layers': -1}, 'freeze_layers is -1'),
    ({'layer_decay': 0.0}, 'layer_decay 0.0'),
    ({'layer_decay': 1.5}, 'layer_decay 1.5'),
])
def test_impossible_ways_to_freeze_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(PLAIN, **change)


def test_more_frozen_layers_than_there_are_are_refused():
  with pytest.raises(ValueError, match='freeze_layers is 4, but there are 3 layers'):
    optim.make(dataclasses.replace(PLAIN, freeze_layers=4), layered_params())


# --- Moments in bfloat16 --------------------------------------------------------------------------


GOOGLE_BERT = optim.OptimizerSettings()


def narrow(settings):
  return dataclasses.replace(settings, moments_dtype='bfloat16')


@pytest.mark.parametrize('name', ['adamw', 'lamb'])
@pytest.mark.parametrize('bias_correction', [False, True])
def test_a_run_with_narrow_moments_ends_where_one_with_wide_ones_does(name, bias_correction):
  """Noisy descent on a bowl: how far the two are apart, against how far both went."""
  settings = optim.OptimizerSettings(
      name=name, learning_rate=0.02, warmup_steps=20, num_steps=400, decay_exclude=(),
      bias_correction=bias_correction)

  def run(settings):
    params = {'kernel': jax.random.normal(jax.random.key(0), (16, 16))}
    tx = optim.make(settings, params)

    def one(carry, key):
      params, state = carry
      noise = 0.3 * jax.random.normal(key, (16, 16))
      updates, state = tx.update({'kernel': 2 * (params['kernel'] - 0.5) + noise}, state, params)
      return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(1), 400)
    (after, state), _ = jax.jit(lambda: jax.lax.scan(one, (params, tx.init(params)), keys))()
    return params['kernel'], after['kernel'], state

  start, wide, _ = run(settings)
  _, narrowed, state = run(narrow(settings))
  assert state[1].mu['kernel'].dtype == state[1].nu['kernel'].dtype == jnp.bfloat16
  assert state[1].count.dtype == jnp.int32
  length = lambda x: float(jnp.linalg.norm(x))
  assert 0 < length(narrowed - wide) < 0.02 * length(wide - start)


def test_a_narrow_second_moment_decays_where_rounding_to_the_nearest_would_hold_it():
  """Gradients of 3 for 1,000 steps, then of 1 for 5,000: the mean square comes down to 1."""
  params = {'kernel': jnp.zeros((50, 40))}
  tx = optim.make(narrow(dataclasses.replace(GOOGLE, decay_exclude=(), clip_norm=0.0)), params)

  def one(state, size):
    grads = {'kernel': jnp.full((50, 40), size)}
    wide = 0.999 * state.nu['kernel'].astype(jnp.float32) + 0.001 * size**2
    stuck = wide.astype(jnp.bfloat16) == state.nu['kernel']
    _, state = tx.update(grads, (optax.EmptyState(), state, *rest), params)
    return state[1], stuck.mean()

  _, adam, *rest = tx.init(params)
  sizes = jnp.where(jnp.arange(6000) < 1000, 3.0, 1.0)
  adam, stuck = jax.jit(lambda: jax.lax.scan(one, adam, sizes))()
  nu = adam.nu['kernel'].astype(jnp.float32)
  exact = 1 + (9 * (1 - 0.999**1000) - 1) * 0.999**5000
  assert float(nu.mean()) == pytest.approx(exact, rel=0.01)
  assert float(nu.std()) < 0.08 and float(jnp.sqrt(nu).std()) < 0.04
  assert float(stuck[-1000:].mean()) > 0.99  # to the nearest, hardly one would have moved


def test_rounding_by_chance_is_right_on_average_and_takes_a_neighbour():
  x = jnp.full((64, 64, 4), 1 + 1 / 512)  # between 1 and 1 + 1/128
  rounded = optim.round_by_chance(x, jnp.uint32(5))
  assert rounded.dtype == jnp.bfloat16
  rounded = np.asarray(rounded, np.float32)
  assert set(np.unique(rounded)) == {1.0, 1 + 1 / 128}
  assert (rounded > 1).mean() == pytest.approx(0.25, abs=0.02)
  assert (rounded[0] != rounded[1]).any() and (rounded[:, 0] != rounded[:, 1]).any()
  other = np.asarray(optim.round_by_chance(x, jnp.uint32(6)), np.float32)
  assert 0.3 < (rounded != other).mean() < 0.45  # 2 * 1/4 * 3/4, were they independent
  exact = jnp.asarray([0.0, 1.0, 0.5, jnp.inf])
  np.testing.assert_array_equal(optim.round_by_chance(exact, jnp.uint32(1)), exact)
  assert jnp.isnan(optim.round_by_chance(jnp.asarray([jnp.nan]), jnp.uint32(1))).all()


def test_narrow_moments_change_neither_the_structure_nor_the_paths_of_a_state():
  params = bert_params()
  wide, narrowed = (jax.eval_shape(optim.make(settings, params).init, params)
                    for settings in (GOOGLE_BERT, narrow(GOOGLE_BERT)))
  assert jax.tree.structure(wide) == jax.tree.structure(narrowed)
  half = lambda leaf: leaf.size * leaf.dtype.itemsize
  assert sum(map(half, jax.tree.leaves(wide[1][1:]))) == 2 * sum(
      map(half, jax.tree.leaves(narrowed[1][1:])))
  restarted = optim.restart(optim.make(narrow(GOOGLE_BERT), params).init(params), moments=True)
  assert {leaf.dtype for leaf in jax.tree.leaves(restarted[1].nu)} == {jnp.dtype('bfloat16')}


def test_another_type_of_moments_is_refused():
  with pytest.raises(ValueError, match="moments_dtype is 'float16'"):
    optim.OptimizerSettings(moments_dtype='float16')
