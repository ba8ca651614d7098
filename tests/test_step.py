"""The train step: one device is eight, parts are the whole, one compilation, exact sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from test_model import TINY, random_batch

from bertjax import checkpoint, dropout, heads, job, objectives, optim, sharding, state, step
from bertjax import train as train_lib
from bertjax.tools import hlo

SETTINGS = optim.OptimizerSettings(learning_rate=1e-3, warmup_steps=2, num_steps=10)
DROPPING = dataclasses.replace(TINY, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
# The real vocabulary, padded to what no mesh of eight leaves whole, and a head for each of eight.
WIDE = dataclasses.replace(TINY, vocab_size=30_522, num_attention_heads=8)


def train(config, batches, *, data=1, fsdp=1, model=1, accumulate=1, settings=SETTINGS, seed=0,
          objective=objectives.PRETRAINING):
  """Steps over `batches` on a mesh of that shape: the last state, the metrics of each, the jit."""
  mesh = sharding.make_mesh(
      sharding.MeshSettings(data, fsdp, model), jax.devices()[:data * fsdp * model])
  build = lambda rngs: heads.BertForPreTraining(config, rngs)
  graphdef, shapes = state.split(build)
  optimizer = optim.make(settings, shapes)
  with jax.set_mesh(mesh):
    like = state.abstract(shapes, optimizer, mesh)
    current = state.create(build, 0, optimizer, like)
    jitted = step.jit_train_step(
        step.TrainStep(graphdef, objective, optimizer, settings, accumulate), like)
    metrics = []
    for batch in batches:
      current, values = jitted(
          current, jax.device_put(batch, sharding.batch_sharding(mesh)), step.seed_word(seed))
      metrics.append(jax.device_get(values))
  return current, metrics, jitted


def uneven_batches(count=3, rows=8, config=TINY):
  """Rows with very unequal numbers of predictions (B050)."""
  batches = [random_batch(config, rows=rows, seed=seed) for seed in range(count)]
  for batch in batches:
    share = np.linspace(0, 1, rows)[:, None]
    used = np.arange(batch['masked_lm_weights'].shape[1])[None] < share * 5
    batch['masked_lm_weights'] = jnp.asarray(used, jnp.float32)
  return batches


def assert_same(one, other, atol=1e-6):
  (state_one, metrics_one, _), (state_other, metrics_other, _) = one, other
  for a, b in zip(metrics_one, metrics_other, strict=True):
    for name in a:
      rtol = 1e-5 if 'loss' in name else 2e-5  # of norms of gradients
      np.testing.assert_allclose(a[name], b[name], rtol=rtol, err_msg=name)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol),
               jax.device_get(state_one.params), jax.device_get(state_other.params))


@pytest.fixture(scope='module')
def alone():
  """Three steps on one device with dropout on."""
  return train(DROPPING, uneven_batches())


@pytest.mark.parametrize('mesh', [{'data': 8}, {'data': 2, 'fsdp': 2, 'model': 2}])
def test_b050_any_mesh_gives_the_losses_and_weights_of_one_device(alone, mesh):
  """With dropout on: a bit depends on the row of the global batch, never on the device."""
  assert_same(train(DROPPING, uneven_batches(), **mesh), alone, atol=2e-6)


@pytest.fixture(scope='module')
def wide_alone():
  """Two steps on one device with the real vocabulary and without dropout."""
  return train(WIDE, uneven_batches(2, config=WIDE))


@pytest.mark.slow
@pytest.mark.parametrize('data, fsdp, model', [
    (8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8), (2, 1, 4)])
def test_the_real_vocabulary_on_any_mesh(wide_alone, data, fsdp, model):
  sharded = train(WIDE, uneven_batches(2, config=WIDE), data=data, fsdp=fsdp, model=model)
  assert_same(sharded, wide_alone, atol=1e-5)


@pytest.mark.parametrize('accumulate', [2, 4])
def test_accumulated_parts_are_the_whole_batch(alone, accumulate):
  assert_same(train(DROPPING, uneven_batches(), accumulate=accumulate), alone, atol=2e-6)
  sharded = train(DROPPING, uneven_batches(), accumulate=accumulate, data=2)
  assert_same(sharded, alone, atol=2e-6)


def packed_pairs(batch):
  """Rows 2 r and 2 r + 1 of a batch, one behind the other in row r of another."""
  batch = jax.device_get(batch)
  rows, length = batch['input_ids'].shape
  lengths = batch['attention_mask'].sum(1)
  starts = np.where(np.arange(rows) % 2, np.roll(lengths, 1), 0)
  packed = {name: np.zeros((rows // 2, 2 * length), np.int32)
            for name in ('input_ids', 'token_type_ids', 'segment_ids', 'position_ids')}
  for row, (start, size) in enumerate(zip(starts, lengths, strict=True)):
    there = row // 2, slice(start, start + size)
    for name in ('input_ids', 'token_type_ids'):
      packed[name][there] = batch[name][row, :size]
    packed['segment_ids'][there] = row % 2 + 1
    packed['position_ids'][there] = np.arange(size)
  pair = lambda values: values.reshape(rows // 2, -1)
  return packed | {
      'masked_lm_positions': pair(batch['masked_lm_positions'] + starts[:, None].astype(np.int32)),
      'cls_positions': pair(starts.astype(np.int32)),
      **{name: pair(batch[name]) for name in (
          'masked_lm_ids', 'masked_lm_weights', 'next_sentence_labels', 'next_sentence_weights')}}


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [{'fsdp': 8}, {'data': 2, 'fsdp': 2, 'model': 2}])
def test_packed_rows_on_a_mesh_are_unpacked_ones_on_a_device(mesh):
  batches = uneven_batches(2, rows=16)
  packed = train(TINY, [packed_pairs(batch) for batch in batches], **mesh,
                 objective=objectives.pretraining(packed=True))
  assert_same(packed, train(TINY, batches), atol=1e-5)


@pytest.mark.parametrize('shape', [(8, 1, 1), (1, 8, 1), (2, 2, 2), (2, 1, 4)])
def test_dropout_differs_between_rows_and_devices_and_is_the_same_on_any_mesh(shape):
  def masks(mesh):
    rows = sharding.batch_sharding(mesh)
    with jax.set_mesh(mesh):
      drop = jax.jit(lambda x: dropout.dropout(x, 0.5, dropout.row_keys(7, jnp.int32(3), 8)),
                     in_shardings=rows, out_shardings=rows)
      return drop(np.ones((8, 16, 32), np.float32))

  one = np.asarray(masks(sharding.make_mesh(sharding.MeshSettings(), jax.devices()[:1])))
  assert len({row.tobytes() for row in one}) == 8
  here = masks(sharding.make_mesh(sharding.MeshSettings(*shape)))
  np.testing.assert_array_equal(here, one)
  shares = {np.asarray(shard.data).tobytes() for shard in here.addressable_shards}
  assert len(shares) == shape[0] * shape[1]  # devices along the model axis have the same rows


def test_the_step_is_compiled_once_and_its_state_donated():
  current, _, jitted = train(TINY, uneven_batches(), data=2, fsdp=2)
  assert jitted._cache_size() == 1
  mesh = sharding.make_mesh(sharding.MeshSettings(2, 2, 1), jax.devices()[:4])
  batch = jax.device_put(uneven_batches(1)[0], sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    jitted(current, batch)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(current.params))


def test_fsdp_shards_parameters_and_moments_by_the_same_table():
  current, _, _ = train(TINY, uneven_batches(1), data=2, fsdp=4)
  moments = current.opt_state[1]
  for tree in (current.params, moments.mu, moments.nu):
    layers = tree['bert']['encoder']['layers']
    kernel = layers['intermediate']['kernel']
    assert kernel.addressable_shards[0].data.shape == (2, TINY.hidden_size // 4, 64)
    table = tree['bert']['embeddings']['word_embeddings']['embedding']
    assert table.addressable_shards[0].data.shape[0] == TINY.padded_vocab_size // 4


@pytest.mark.slow
def test_moments_in_bfloat16_on_a_mesh_and_through_a_checkpoint(tmp_path):
  settings = dataclasses.replace(SETTINGS, moments_dtype='bfloat16')
  alone = train(TINY, uneven_batches(), settings=settings)
  sharded = train(TINY, uneven_batches(), settings=settings, data=2, fsdp=2, model=2)
  # A moment may be rounded the other way: 0.8 % of an update of up to 3 times the rate of 1e-3.
  assert_same(sharded, alone, atol=5e-5)
  current = sharded[0]
  for tree in (current.opt_state[1].mu, current.opt_state[1].nu):
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype('bfloat16')}
    jax.tree.map(lambda moment, parameter: np.testing.assert_(
        moment.sharding.is_equivalent_to(parameter.sharding, moment.ndim)), tree, current.params)
  (tmp_path / 'vocab.txt').write_text('[PAD]', encoding='utf-8')
  with checkpoint.Checkpoints(
      epath.Path(tmp_path / 'run'), save_every=1, keep_last=1, keep_every=0,
      metadata={'config': {}, 'data_hash': '', 'tokenizer_hash': ''},
      tokenizer=epath.Path(tmp_path)) as checkpoints:
    checkpoints.save(3, current, {'phase': 0}, force=True)
    checkpoints.wait()
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding), current)
    restored, _ = checkpoints.restore(like)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(current))
  assert jax.tree.map(lambda leaf: leaf.dtype, restored) == jax.tree.map(
      lambda leaf: leaf.dtype, current)


def analysed(config=WIDE, **mesh):
  """What the step for eight devices does."""
  mesh = sharding.make_mesh(sharding.MeshSettings(**mesh))
  graphdef, shapes = state.split(lambda rngs: heads.BertForPreTraining(config, rngs))
  optimizer = optim.make(SETTINGS, shapes)
  batch = uneven_batches(1, config=config)[0]
  with jax.set_mesh(mesh):
    like = state.abstract(shapes, optimizer, mesh)
    train_step = step.TrainStep(graphdef, objectives.PRETRAINING, optimizer, SETTINGS)
    jitted = step.jit_train_step(train_step, like)
    batch = jax.device_put(batch, sharding.batch_sharding(mesh))
    found = hlo.analyse(jitted.lower(like, batch).compile().as_text())
  forward, backward = (loop.collectives for loop in found.loops
                       if loop.trips == config.num_hidden_layers)
  return {kind: traffic.count for kind, traffic in found.collectives.items()}, forward, backward


# Forward and backward pass of a layer: at most that many collectives, of no other kind. In all, the
# layers counted twice: data: the gradients outside the layers and the metrics; fsdp: the tables and
# the matrices of the heads; model: those, the word table's look-up and the cross-entropy.
@pytest.mark.slow
@pytest.mark.parametrize('mesh, forward, backward, in_all', [
    ({'data': 8}, {}, {'all-reduce': 1}, {'all-reduce': 4}),
    ({'data': 1, 'fsdp': 8}, {'all-gather': 6}, {'all-gather': 6, 'all-reduce': 1},
     {'all-gather': 21, 'all-reduce': 10}),
    ({'data': 1, 'model': 8}, {'all-reduce': 2}, {'all-reduce': 2}, {'all-reduce': 13}),
    ({'data': 2, 'fsdp': 2, 'model': 2}, {'all-gather': 6, 'all-reduce': 2},
     {'all-gather': 6, 'all-reduce': 3},
     {'all-gather': 21, 'all-reduce': 25, 'collective-permute': 6}),
])
def test_what_a_step_communicates(mesh, forward, backward, in_all):
  """No all-to-all; of a data axis all-reduces only; a weight matrix is gathered once a pass."""
  counts, *passes = analysed(**mesh)
  for found, most in zip((counts, *passes), (in_all, forward, backward), strict=True):
    assert set(found) <= set(most)
    assert all(found[kind] <= most[kind] for kind in found)


@dataclasses.dataclass(frozen=True)
class Batches:
  """Random rows of one length (a job.Stream)."""

  length: int
  statistics: dict = dataclasses.field(default_factory=dict)
  examples_per_row: float = 1.0
  mean_length: float = 8.0

  @property
  def shapes(self):
    batch = next(self.batches(0, 1))
    return ({name: (array.shape, array.dtype.type) for name, array in batch.items()},)

  def batches(self, first, num_steps):
    for seed in range(first, first + num_steps):
      yield jax.device_get(random_batch(rows=8, length=self.length, seed=seed))


def two_phases(folder):
  """A run on eight devices of two phases, two steps each: lengths 8 and 16."""
  (folder / 'vocab.txt').write_text('[PAD]', encoding='utf-8')
  stage = lambda length: job.Stage(
      objective=objectives.PRETRAINING, num_steps=2, batch_size=8, optimizer=SETTINGS,
      open=lambda: Batches(length), flops_per_row=float)
  return job.Job(
      title='test', build=lambda rngs: heads.BertForPreTraining(TINY, rngs),
      stages=(stage(8), stage(16)), mesh=sharding.make_mesh(sharding.MeshSettings(1, 8, 1)),
      seed=0, metadata={'config': {}, 'data_hash': '', 'tokenizer_hash': ''},
      tokenizer=epath.Path(folder))


@pytest.mark.slow
def test_a_run_compiles_the_step_once_for_each_phase_and_says_what_a_device_holds(
    tmp_path, caplog, monkeypatch):
  said = []
  monkeypatch.setattr(train_lib, '_log', said.append)
  run = two_phases(tmp_path)
  with jax.log_compiles():
    assert train_lib.train(run, tmp_path / 'run') == 0
  compilations = [line for record in caplog.records
                  if (line := record.getMessage()).startswith('Finished XLA compilation')]
  assert sum('train_step' in line for line in compilations) == 2, compilations
  _, shapes = state.split(run.build)
  like = state.abstract(shapes, optim.make(SETTINGS, shapes), run.mesh)
  parameters, moments = (f'{sharding.bytes_per_device(tree) / 2**20:,.1f} MiB'
                         for tree in (like.params, like.opt_state))
  assert f'{parameters} of parameters and {moments} of the optimizer a device' in said[0]


def test_b057_the_logged_rate_is_the_applied_rate():
  """Against the schedule of the paper's code: the first update of a warm-up has rate 0."""
  _, metrics, _ = train(TINY, uneven_batches(4))
  rates = [float(values['learning_rate']) for values in metrics]
  np.testing.assert_allclose(rates, [0, 5e-4, 1e-3 * (1 - 2 / 10), 1e-3 * (1 - 3 / 10)], rtol=1e-6)


def test_gradient_norm_is_that_of_the_unclipped_global_gradient():
  batches = uneven_batches(1)
  free = train(TINY, batches, settings=dataclasses.replace(SETTINGS, clip_norm=0.0))
  clipped = train(TINY, batches, settings=dataclasses.replace(SETTINGS, clip_norm=1e-3), data=4)
  np.testing.assert_allclose(
      free[1][0]['grad_norm'], clipped[1][0]['grad_norm'], rtol=1e-5)
  assert free[1][0]['grad_norm'] > 0.01


def test_another_seed_drops_other_elements(alone):
  other = train(DROPPING, uneven_batches(), seed=1)
  assert other[1][0]['masked_lm_loss_sum'] != alone[1][0]['masked_lm_loss_sum']


@pytest.mark.parametrize('sizes, mend', [
    ({'data': 3}, 'set one axis to -1'), ({'data': -1, 'fsdp': -1}, 'one may be -1'),
    ({'data': 0}, 'positive'), ({'data': 2, 'fsdp': 2}, 'does not fit 8 devices')])
def test_a_mesh_that_does_not_fit_is_refused_with_the_mend(sizes, mend):
  with pytest.raises(ValueError, match=mend):
    sharding.make_mesh(sharding.MeshSettings(**sizes))


def test_every_parameter_is_named_in_the_sharding_table():
  """The last rule, 'replicated', is for vectors only: a matrix that it takes was forgotten."""
  _, shapes = state.split(lambda rngs: heads.BertForPreTraining(TINY, rngs))
  mesh = sharding.make_mesh(sharding.MeshSettings(data=1, fsdp=8))

  def check(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    small = 'position' in name or 'token_type' in name or name == 'next_sentence/kernel'
    stacked = 'layers/' in name
    if leaf.ndim - stacked >= 2 and not small:
      assert any(sharding.spec_of(name, leaf.shape, mesh)), name

  jax.tree_util.tree_map_with_path(check, shapes)
