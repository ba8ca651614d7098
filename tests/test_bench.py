"""The benchmark of the train step: its figures fit together, and what cannot be run is said."""

import contextlib
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import attention, metrics
from bertjax.config import ConfigError
from bertjax.tools import bench, bench_variant, op_costs

CONFIG = '''
from configs import tiny


def get_config():
  config = tiny.get_config()
  config.model.update(dict(
      hidden_size=16, num_hidden_layers=1, intermediate_size=32, max_position_embeddings=64,
      scan_unroll=1))
  config.data.vocab_size = 300
  config.phases[0].update(dict(seq_length=64, batch_size=8))
  return config
'''


# From ml_collections, which loads configuration files in an old way.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:DeprecationWarning')


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp('bench') / 'small.py'
  path.write_text(CONFIG, encoding='utf-8')
  return str(path)


@dataclasses.dataclass
class Ran:
  result: dict
  words: str
  compilations: int


@pytest.fixture(scope='module')
def ran(config, tmp_path_factory) -> Ran:
  """Packed against unpacked, as a user runs it."""
  folder, compiled, compile_it = tmp_path_factory.mktemp('out'), [], jax.stages.Lowered.compile

  def counted(lowered, *args, **kwargs):
    compiled.append(lowered)
    return compile_it(lowered, *args, **kwargs)

  words = io.StringIO()
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(words):
    patch.setattr(jax.stages.Lowered, 'compile', counted)
    code = bench.main([
        f'--config={config}', '--compare=max_examples_per_row=1,4', '--steps=9', '--rounds=2',
        '--config.hidden_dropout_prob=0', f'--trace={folder / "profile"}',
        f'--json={folder / "out.json"}'])
  assert code == 0
  result = json.loads((folder / 'out.json').read_text(encoding='utf-8'))
  return Ran(result, words.getvalue(), len(compiled))


def test_every_variant_is_compiled_once(ran):
  assert ran.compilations == 2 == len(ran.result['variants'])


def test_the_figures_fit_together(ran):
  for report in ran.result['variants']:
    seconds = report['step_ms']['median'] / 1e3
    assert report['steps'] == 18 and report['batch_size'] == 8
    assert report['step_ms']['p10'] <= report['step_ms']['median'] <= report['step_ms']['p90']
    assert report['rows_per_second'] * seconds == pytest.approx(8)
    assert report['examples_per_second'] * seconds == pytest.approx(8 * report['examples_per_row'])
    assert report['real_tokens_per_second'] * seconds == pytest.approx(
        8 * 64 * report['real_token_share'])
    assert report['model_flops_per_step'] == 8 * metrics.model_flops_per_example(
        hidden_size=16, num_hidden_layers=1, intermediate_size=32, vocab_size=300, seq_length=64,
        num_predictions=10)
    assert report['model_flops_per_second_and_device'] * seconds * 8 == pytest.approx(
        report['model_flops_per_step'])
    assert report['mfu'] is None and report['share_of_matmul_rate'] is None
    assert 0 <= report['wait_share'] <= 1 and report['pipeline']['examples_per_second'] > 0
    assert list(report['first_step_seconds']) == [
        'open_data', 'first_batch', 'trace', 'compile', 'init', 'first_run']
    assert report['attention'] == 'xla' and report['hidden_dropout_prob'] == 0
  assert ran.result['devices'] == 8 and ran.result['peak_memory_of'] == 'host process'
  assert ran.result['peak_memory_bytes'] > 2**26


def test_packing_leaves_less_padding_and_is_compared_with_the_first(ran):
  plain, packed = ran.result['variants']
  assert plain['examples_per_row'] == 1 < packed['examples_per_row'] <= 4
  assert plain['real_token_share'] < packed['real_token_share'] <= 1
  assert plain['step_time_ratio'] == 1 and packed['step_time_ratio'] > 0


def test_the_words_say_what_was_measured(ran):
  for text in ('random words', 'unknown chip', 'max_examples_per_row=4', 'packed up to 4',
               'real tokens/s', 'against the first', 'matrix products', 'trace', 'sequences/s'):
    assert text in ran.words
  report = ran.result['variants'][0] | {'mfu': 0.5, 'share_of_matmul_rate': 0.6,
                                        'wait_share': None, 'costs': []}
  words = bench.describe({**ran.result, 'variants': [report], 'matmul_flops_per_second': 7e14})
  for text in ('MFU 50.0%', '60.0% of the measured', '700 TFLOP/s', 'too few steps',
               'holds no operations'):
    assert text in words


def test_the_profile_is_of_the_step_and_its_shares_are_of_all(ran):
  for report in ran.result['variants']:
    assert sum(cost['share'] for cost in report['costs']) == pytest.approx(1)
    kinds = {cost['kind'] for cost in report['costs']}
    assert {'matmul', 'other'} <= kinds
    assert any('layer/attention' in cost['name'] for cost in report['costs'])
  assert [cost['milliseconds'] for cost in report['costs']] == sorted(
      (cost['milliseconds'] for cost in report['costs']), reverse=True)


def test_three_costs_that_are_no_matrix_products_are_always_shown():
  costs = [{'name': f'product {i}', 'kind': 'matmul', 'milliseconds': 1.0, 'share': 0.05}
           for i in range(15)]
  costs += [{'name': f'other {i}', 'kind': 'other', 'milliseconds': 0.5, 'share': 0.01}
            for i in range(5)]
  words = '\n'.join(bench._cost_lines(costs))
  assert 'product 9' in words and 'product 10' not in words
  assert 'other 2' in words and 'other 3' not in words


@pytest.mark.parametrize('kernel, kind', [
    ('nvjet_hsh_256x128', 'matmul'), ('sm90_xmma_gemm_bf16', 'matmul'), ('__cublas$lt$matmul',
                                                                         'matmul'),
    ('__cudnn$fmhaSoftmaxBackward', 'attention'), ('cudnn_generated_sdpa_sm90', 'attention'),
    ('ncclDevKernel_AllReduce', 'collective'), ('loop_multiply_fusion', 'other')])
def test_kernels_are_known_by_their_names(kernel, kind):
  assert op_costs._kind_of_name(kernel) == kind


def test_the_matrix_rate_is_that_of_a_product():
  assert bench_variant.matmul_rate(seconds=0.0) > 1e6


@pytest.mark.parametrize('arguments, words', [
    (['--phase=1'], 'has phase 0 only'),
    (['--compare=atention=xla,cudnn'], "no key 'atention'.*attention"),
    (['--compare=mesh.colour=1,2'], 'mesh.colour'),
    (['--compare=nothing.colour=1,2'], 'no section'),
    (['--compare=attention=xla'], 'at least two'),
    (['--compare=attention=xla,xla', '--compare=remat=none,full,dots'], 'as many'),
    (['--compare=batch_size=8,eight'], "batch_size is 'eight'"),
    (['--seq_length=128'], 'max_position_embeddings'),
    (['--batch_size=9'], 'batch_size 9'),
    (['--config.phases.seq_lengths=(32,64)'], 'times rows of one length'),
    (['--compare=attention=xla,cudnn'], 'needs a GPU'),
    (['--data=/nowhere'], '/nowhere'),
])
def test_what_cannot_be_run_is_said_before_anything_is_compiled(
    config, arguments, words, capsys, monkeypatch):
  monkeypatch.setattr(bench_variant.Variant, 'begin', lambda self: pytest.fail('compiled'))
  assert bench.main([f'--config={config}', *arguments]) == 2
  with pytest.raises(ConfigError, match=words):
    raise ConfigError(capsys.readouterr().err)


def test_a_wrong_configuration_or_option_is_said(tmp_path, capsys):
  assert bench.main(['--config=nowhere.py']) == 2
  assert "no configuration file 'nowhere.py'" in capsys.readouterr().err
  (tmp_path / 'broken.py').write_text('def get_config(:\n', encoding='utf-8')
  assert bench.main([f'--config={tmp_path / "broken.py"}']) == 2
  assert 'broken.py' in capsys.readouterr().err
  for wrong in (['--nonsense'], ['--steps=0'], ['--rounds=0']):
    with pytest.raises(SystemExit) as end:
      bench.main(['--config=nowhere.py', *wrong])
    assert end.value.code == 2


def test_a_value_is_found_by_its_short_or_its_long_name(config):
  values = bench.read_config(config, 0, '.')
  assert bench.changed(values, 'remat', 'full')['model']['remat'] == 'full'
  assert bench.changed(values, 'batch_size', '16')['phases'][0]['batch_size'] == 16
  assert bench.changed(values, 'phases.batch_size', '16')['phases'][0]['batch_size'] == 16
  assert bench.changed(values, 'mesh.fsdp', '2')['mesh']['fsdp'] == 2
  assert bench.changed(values, 'data.whole_word_masking', 'True')['data']['whole_word_masking']
  assert bench.changed(values, 'seed', '3')['seed'] == 3
  assert values['seed'] == 0 and values['model']['remat'] == 'none'
  assert list(bench.variants(values, ['remat=none,none'])) == ['remat=none', 'remat=none again']


# --- On a GPU ------------------------------------------------------------------------------------


def attended(implementation, dtype, arrays, mask, ids):
  def loss(query, key, value):
    out = attention.attend(query, key, value, mask, implementation=implementation,
                           segment_ids=ids)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)) * mask[..., None, None]), out

  arrays = [array.astype(dtype) for array in arrays]
  gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
  return [np.asarray(array.astype(jnp.float32)) for array in (out, *gradients)]


@pytest.mark.skipif(jax.default_backend() != 'gpu', reason="cuDNN's attention needs a GPU")
@pytest.mark.parametrize('length', [128, 512])
@pytest.mark.parametrize('packed', [False, True])
def test_cudnn_attention_is_that_of_xla(length, packed):
  """As near to attention in float32 as `xla` in bfloat16 is, with its gradients."""
  draw = np.random.default_rng(0)
  arrays = [jnp.asarray(draw.normal(size=(4, length, 12, 64)), jnp.float32) for _ in range(3)]
  mask = jnp.arange(length)[None] < jnp.asarray([length, length - 9, length // 3, 1])[:, None]
  ids = jnp.asarray(np.sort(draw.integers(1, 5, (4, length)), 1)) * mask if packed else None
  right, near, found = (attended(name, dtype, arrays, mask, ids) for name, dtype in (
      ('xla', jnp.float32), ('xla', jnp.bfloat16), ('cudnn', jnp.bfloat16)))
  real = np.asarray(mask)[..., None, None]
  for one, other, exact in zip(found, near, right, strict=True):
    assert np.isfinite(one).all()
    off, usual = (np.abs(array - exact) * real for array in (one, other))
    assert off.max() <= 2 * usual.max() + 1e-3
    assert off.mean() <= 2 * usual.mean() + 1e-5
