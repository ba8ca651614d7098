"""Compiling for chips that are elsewhere: what is said, the search, and real compilations."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from bertjax import settings as settings_lib
from bertjax import sharding
from bertjax.tools import aot, aot_chips, hlo
from configs import tiny

CONFIG = '''
from configs import base


def get_config():
  config = base.get_config()
  config.model.attention_probs_dropout_prob = 0.0
  config.model.remat = 'dense_attention'
  return config
'''
GIB = 2**30


@pytest.fixture
def config(tmp_path):
  path = tmp_path / 'configs' / 'base_tpu.py'
  path.parent.mkdir()
  path.write_text(CONFIG, encoding='utf-8')
  return str(path)


def test_without_a_compiler_it_says_how_to_install_it(monkeypatch, capsys, config):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  assert aot.main(['--config', config, '--topology', 'v5e:2x2']) == 2
  assert "pip install -e '.[tpu]'" in capsys.readouterr().err
  assert aot.main(['--config', config, '--topology', 'h200:8']) == 2
  assert 'pip install jax-cuda13-plugin==' in capsys.readouterr().err


@pytest.mark.parametrize('message, nbytes', [
    ('Ran out of memory on HBM, the total memory required for HLO temporaries (106.50G) exceeds '
     'available HBM (15.75G).', round(106.5 * GIB)),
    ('Ran out of memory in memory space hbm. Used 512.0M of 15.75G hbm.', 512 * 2**20),
    ('something else', 0),
])
def test_what_a_step_needs_is_read_from_the_compilers_message(message, nbytes):
  assert aot._needed(message) == nbytes


PER_ROW = {'none': 1.3 * GIB, 'dense_attention': 0.3 * GIB, 'dense': 0.25 * GIB,
           'full': 0.05 * GIB}


@pytest.fixture
def plan():
  """Eight rows a chip of sixteen."""
  values = tiny.get_config()
  values.data.path = '.'
  settings = settings_lib.from_config(values)
  mesh = types.SimpleNamespace(shape={'data': 1, 'fsdp': 16, 'model': 1})
  bert = dataclasses.replace(settings.bert_config(200), attention='splash')
  return aot.Plan(settings, bert, mesh, aot_chips.chip('v5e:4x4')).with_rows(8)


def test_the_search_finds_the_most_rows_of_every_policy_in_a_few_tries(monkeypatch, plan):
  def compiled(plan, full_effort):
    peak = 0.5 * GIB + plan.rows * PER_ROW[plan.bert.remat]
    if peak > 15.75 * GIB:
      return aot.Report(False, plan.bert.remat, plan.rows, {'needed': round(peak)})
    return aot.Report(True, plan.bert.remat, plan.rows,
                      {'peak': round(peak), 'arguments': round(0.25 * GIB)})

  monkeypatch.setattr(aot, 'compile_plan', compiled)
  tries = []
  found = {report.remat: report.rows for report in aot.search(plan, tell=tries.append)}
  assert found['none'] == 11
  for policy in ('dense_attention', 'dense', 'full'):
    most = 15.25 * GIB / PER_ROW[policy]
    assert most - max(1, most / 32) <= found[policy] <= most
  assert len(tries) <= 13


def test_a_policy_of_which_not_one_row_fits_is_left_out(monkeypatch, plan):
  monkeypatch.setattr(aot, 'compile_plan', lambda plan, full_effort: aot.Report(
      plan.bert.remat == 'full' and plan.rows < 3, plan.bert.remat, plan.rows,
      {'peak': GIB, 'arguments': 0, 'needed': 0}))
  assert [(report.remat, report.rows) for report in aot.search(plan)] == [('full', 2)]


@pytest.mark.parametrize('most, fields', [(1, {'attention_mask'}), (4, {'segment_ids'})])
def test_what_is_compiled_is_the_step_of_the_phase_packed_or_not(plan, most, fields):
  phase = dataclasses.replace(plan.settings.phases[0], max_examples_per_row=most, batch_size=8)
  mesh = sharding.make_mesh(sharding.MeshSettings())
  lowered = aot._lower(dataclasses.replace(
      plan, mesh=mesh, bert=dataclasses.replace(plan.bert, attention='xla'),
      settings=dataclasses.replace(plan.settings, phases=(phase,))))
  (_, batch, seed), _ = lowered.args_info
  assert fields <= set(batch) and ('segment_ids' in batch) == (most > 1)
  assert seed.shape == ()  # an argument, as in train.py: no constant of the program


def test_without_cudnn_its_attention_is_refused_and_not_replaced(monkeypatch, plan):
  def missing(*_, **kwargs):
    raise RuntimeError('cuDNN not found.')

  monkeypatch.setattr(jax.nn, 'dot_product_attention', missing)
  bert = dataclasses.replace(plan.bert, attention='cudnn', attention_probs_dropout_prob=0.0)
  mesh = sharding.make_mesh(sharding.MeshSettings())
  with pytest.raises(aot.AotError, match='nvidia-cudnn-cu13.*--attention=xla'):
    aot._lower(dataclasses.replace(plan, bert=bert, mesh=mesh))


def test_without_a_gpu_the_limit_is_ours(monkeypatch, plan):
  """CUDA's compiler refuses nothing: the report does, and says what is not shown."""
  monkeypatch.delenv('XLA_PYTHON_CLIENT_MEM_FRACTION', raising=False)
  plan = dataclasses.replace(plan, chip=aot_chips.chip('h200:8'), mesh=types.SimpleNamespace(
      shape=plan.mesh.shape, size=16,
      devices=np.array([types.SimpleNamespace(device_kind='NVIDIA H200')])))
  lowered = types.SimpleNamespace(compile=lambda compiler_options: None)
  monkeypatch.setattr(aot, '_lower', lambda plan: lowered)
  memory = dict.fromkeys(('arguments', 'outputs', 'donated', 'temporaries', 'code'), GIB)
  for peak, fits in ((104, True), (105, False)):
    monkeypatch.setattr(aot, '_report', lambda plan, compiled, *_, peak=peak: aot.Report(
        True, 'none', plan.rows, {**memory, 'peak': peak * GIB}, hbm_bytes=1))
    report = aot.compile_plan(plan)
    said = aot.describe(plan, report)
    assert report.fits == fits and ('FITS  ' in said) == fits
    assert 'arguments 1.00' in said and 'temporaries 1.00' in said
    assert 'proves nothing about speed' in said


def test_a_kernel_counts_as_products_of_scores_and_contexts():
  splash = hlo.Kernel('splash_mha_fwd', ((2, 16, 128, 64),))
  assert aot._kernel_products(splash) == (2 * 2 * 16 * 128**2 * 64, 2, 2)
  cudnn = hlo.Kernel('__cudnn$fmhaScaleBiasSoftmaxBackward', ((2, 128, 16, 64),))
  assert aot._kernel_products(cudnn) == (2 * 2 * 16 * 128**2 * 64, 5, 4)


def run_aot(config, topology, *arguments):
  """The command as a user calls it, without what the suite does to XLA."""
  environment = {name: value for name, value in os.environ.items()
                 if name not in ('XLA_FLAGS', 'JAX_DISABLE_MOST_OPTIMIZATIONS')}
  return subprocess.run(
      [sys.executable, '-m', 'bertjax.tools.aot', '--config', config, '--topology', topology,
       *arguments], env=environment, capture_output=True, encoding='utf-8', check=False)


@pytest.mark.slow
def test_base_compiles_for_a_tpu_with_the_splash_kernel(config):
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip("no libtpu: pip install -e '.[tpu]'")
  done = run_aot(config, 'v5e:2x2', '--json', '--fsdp', '4', '--batch_size', '128')
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  assert report['fits'] and report['rows'] == 32
  assert report['rematerialised'] == 0
  assert report['memory']['peak'] < 8 * GIB
  assert report['model_flops'] < report['flops'] < 1.2 * report['model_flops']
  assert report['repeated_share'] < 0.01
  assert 'all-to-all' not in report['collectives']
  layers = [collectives for trips, collectives in report['loops'] if trips == 12]
  assert len(layers) == 2 and all(collectives.get('all-gather', 0) <= 6 for collectives in layers)


@pytest.mark.slow
def test_a_small_model_compiles_for_gpus_without_one():
  if importlib.util.find_spec('jax_cuda13_plugin') is None:
    pytest.skip("JAX's CUDA plugin is not installed: pip install jax-cuda13-plugin")
  done = run_aot('configs/tiny.py', 'h200:8', '--json')
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  assert report['fits'] and report['rows'] == 4
  assert report['memory']['arguments'] > report['memory']['donated'] > 0
  assert report['memory']['temporaries'] > 0
  assert set(report['collectives']) == {'all-reduce'}
  assert report['flops'] >= report['model_flops']


def test_what_cannot_be_tried_is_told_in_a_line(monkeypatch, capsys, config):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: True)
  assert aot.main(['--config', config, '--topology', 'v9:2x2']) == 2
  assert 'known are v4, v5e, v5p, v6e, a100, h100, h200' in capsys.readouterr().err


def test_what_the_compiler_repeats_by_itself_is_told():
  report = aot.Report(True, 'none', 15.0, {'peak': 1}, repeated_share=0.1)
  assert aot._repeats(report) == '10.0% of the forward pass is computed again'
  assert 'memory ran short: 47 instructions' in aot._repeats(
      dataclasses.replace(report, rescues=47))


def test_a_report_knows_only_json_types():
  report = aot.Report(True, 'none', 8.0, {'peak': 1}, {'all-reduce': (1, 2)}, ((2, {}),))
  assert json.loads(json.dumps(dataclasses.asdict(report)))['loops'] == [[2, {}]]
