"""The features tool: every text once, in order, and the same whatever it is computed with."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bertjax import api, checkpoint, features, heads, state
from bertjax.data import tokenizer
from bertjax.model import BertConfig
from bertjax.tools import features as tool

TEXT = ['the cat sits on the mill and sings', 'it sleeps a lot', 'she says no to the boat'] * 4
LINES = ['the cat sits', 'it sleeps a lot\tshe says no', '', 'mill ' * 40, 'sings', 'the cat sits']


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A checkpoint of a tiny model with random weights."""
  folder = tmp_path_factory.mktemp('saved')
  words = tokenizer.train(TEXT, 'wordpiece', 120)
  words.save(folder / 'tokenizer')
  config = BertConfig(
      vocab_size=words.vocab_size, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
      intermediate_size=32, max_position_embeddings=72, initializer_range=0.5)
  params = jax.jit(
      lambda: state.init_params(lambda rngs: heads.BertForPreTraining(config, rngs), 0))()
  checkpoint.save_params(folder / 'run', 0, params,
                         {'config': {'model': dataclasses.asdict(config)}}, folder / 'tokenizer')
  return folder / 'run'


@pytest.fixture(scope='module')
def model(saved):
  return api.load(saved)


@pytest.fixture(scope='module')
def wanted(model):
  """Ids and hidden states [L + 1, T, D] of each line, alone and without padding."""
  found = {line: alone(model, line) for line in set(LINES)}
  return [found[line] for line in LINES]


def run(saved, folder, capsys, text, *more, output='features.npz') -> tuple[int, str]:
  (folder / 'sentences.txt').write_bytes(text if isinstance(text, bytes) else text.encode())
  code = tool.main(['--checkpoint', str(saved), '--input', str(folder / 'sentences.txt'),
                    '--output', str(folder / output), *more])
  return code, capsys.readouterr().err


def alone(model, line):
  first, *rest = line.split('\t')
  tok = model.tokenizer
  ids = [tok.cls_id, *tok.encode(first).ids, tok.sep_id]
  kinds = [0] * len(ids)
  if rest:
    second = [*tok.encode(rest[0]).ids, tok.sep_id]
    ids, kinds = ids + second, kinds + [1] * len(second)
  ids, kinds = (jnp.array([row], jnp.int32) for row in (ids, kinds))
  bert = nnx.merge(model.graphdef, model.params).bert
  return np.asarray(ids[0]), np.asarray(bert.hidden_states(ids, kinds, jnp.ones_like(ids)))[:, 0]


def test_vectors_of_every_token(saved, wanted, tmp_path, capsys):
  code, _ = run(saved, tmp_path, capsys, '\n'.join(LINES) + '\n', '--layers=-1,0,-3',
                '--batch_size', '2')
  assert code == 0
  with np.load(tmp_path / 'features.npz') as found:
    assert set(found) == {'layer_-1', 'layer_0', 'layer_-3', 'row_splits', 'input_ids'}
    splits = found['row_splits']
    assert (splits.dtype, len(splits)) == (np.int64, len(LINES) + 1)
    for number, (ids, states) in enumerate(wanted):
      here = slice(splits[number], splits[number + 1])
      np.testing.assert_array_equal(found['input_ids'][here], ids)
      for layer in (-1, 0, -3):
        vectors = found[f'layer_{layer}']
        assert (vectors.dtype, vectors.shape) == (np.float32, (splits[-1], 16))
        np.testing.assert_allclose(vectors[here], states[layer], rtol=0, atol=2e-5)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['features.npz', 'sentences.txt']


@pytest.mark.parametrize('pooling', ['cls', 'mean'])
def test_pooled(saved, wanted, tmp_path, capsys, pooling):
  code, _ = run(saved, tmp_path, capsys, '\r\n'.join(LINES), '--layers=2,3', '--pooling', pooling)
  assert code == 0
  with np.load(tmp_path / 'features.npz') as found:
    assert set(found) == {'layer_2', 'layer_3'}
    for number, (_, states) in enumerate(wanted):
      pooled = states[:, 0] if pooling == 'cls' else states.mean(1)
      for layer in (2, 3):
        np.testing.assert_allclose(found[f'layer_{layer}'][number], pooled[layer], rtol=0,
                                   atol=2e-5)


def test_the_same_bits_in_any_company(model):
  def vectors(lines):
    texts = [(line.partition('\t')[0], line.partition('\t')[2] or None) for line in lines]
    rows = features.encode(texts, model.tokenizer, 72)
    out = [None] * len(lines)
    for indices, values in features.hidden_states(model, rows, [-1], 'none', batch_size=3):
      for index, value in zip(indices, values[0], strict=True):
        out[index] = value[:len(rows[index]['input_ids'])]
    return out

  together = vectors(LINES)
  np.testing.assert_array_equal(together[0], together[5])
  for line, wanted in zip(LINES, together, strict=True):
    np.testing.assert_array_equal(vectors([line])[0], wanted)
  for got, wanted in zip(vectors(LINES[::-1]), together[::-1], strict=True):
    np.testing.assert_array_equal(got, wanted)


def test_layers_from_either_end_are_the_same(model):
  rows = features.encode([('the cat', None)], model.tokenizer, 72)
  [(_, values)] = features.hidden_states(model, rows, [0, 1, 2, 3, -4, -3, -2, -1])
  np.testing.assert_array_equal(values[:4], values[4:])
  assert not np.array_equal(values[0], values[3])


def test_too_long_lines_are_refused_or_cut(saved, tmp_path, capsys):
  text = 'the cat\n' + 'mill ' * 80 + '\n' + 'mill ' * 90 + '\tcat\n'
  code, said = run(saved, tmp_path, capsys, text)
  assert code == 2
  assert 'sentences.txt: line 2: 82 tokens, but the model takes 72 (and 1 more lines' in said
  assert not (tmp_path / 'features.npz').exists()
  code, _ = run(saved, tmp_path, capsys, text, '--truncate')
  assert code == 0
  with np.load(tmp_path / 'features.npz') as found:
    assert np.diff(found['row_splits'])[1:].tolist() == [72, 72]
    assert found['input_ids'].shape == found['layer_-1'].shape[:1]


@pytest.mark.parametrize('text, more, said', [
    (b'\xff\xfe\x00', [], 'sentences.txt: line 1: not UTF-8 text at byte 0'),
    ('', [], 'sentences.txt: no lines'),
    ('a\nb\tc\td\n', [], 'sentences.txt: line 2: 2 TABs'),
    ('a', ['--layers=-5'], 'layers -5: this model has layers 0 (embeddings) to 3'),
    ('a', ['--layers=1,4'], 'layers 4: this model'),
    ('a', ['--layers=1,1'], 'name every layer once'),
    ('a', ['--checkpoint', 'nowhere'], 'does not exist'),
    ('a', ['--input', 'nowhere'], 'nowhere: no such file'),
    ('a', ['--output', '.'], 'is a folder'),
])
def test_errors_in_words(saved, tmp_path, capsys, monkeypatch, text, more, said):
  monkeypatch.chdir(tmp_path)
  code, err = run(saved, tmp_path, capsys, text, *more)
  assert code == 2
  assert said in err
  assert [path.name for path in tmp_path.iterdir()] == ['sentences.txt']


@pytest.mark.parametrize('flags', [['--layers=a'], ['--layers='], ['--batch_size', '0'],
                                   ['--pooling', 'max']])
def test_wrong_flags(saved, tmp_path, capsys, flags):
  with pytest.raises(SystemExit) as stop:
    run(saved, tmp_path, capsys, 'a', *flags)
  assert stop.value.code == 2


def test_a_run_that_fails_leaves_what_was_there(saved, tmp_path, capsys, monkeypatch):
  (tmp_path / 'features.npz').write_bytes(b'old')
  def fail(*_):
    raise OSError('no space left')
  monkeypatch.setattr(features.zipfile.ZipFile, 'write', fail)
  code, said = run(saved, tmp_path, capsys, 'a')
  assert (code, 'no space left' in said) == (2, True)
  assert (tmp_path / 'features.npz').read_bytes() == b'old'
  assert len(list(tmp_path.iterdir())) == 2


def test_pairs_need_a_model_of_two_segments(model):
  rows = features.encode([('a', 'b')], model.tokenizer, 72)
  one = dataclasses.replace(model, config=dataclasses.replace(model.config, type_vocab_size=1))
  with pytest.raises(features.FeatureError, match='one segment only'):
    list(features.hidden_states(one, rows, [-1]))
  with pytest.raises(features.FeatureError, match="pooling 'max' is none of none, cls, mean"):
    list(features.hidden_states(model, rows, [-1], 'max'))


def test_as_a_command(saved, tmp_path):
  (tmp_path / 'in.txt').write_text('the cat\nit sleeps\n', encoding='utf-8')
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  done = subprocess.run(
      [sys.executable, '-W', 'error', '-m', 'bertjax.tools.features', '--checkpoint', str(saved),
       '--input', str(tmp_path / 'in.txt'), '--output', str(tmp_path / 'out.npz'),
       '--layers=-1,-2', '--pooling=mean'],
      capture_output=True, text=True, encoding='utf-8', env=environment, check=False)
  assert done.returncode == 0, done.stderr
  assert 'Traceback' not in done.stderr
  assert '2 texts, ' in done.stdout
  with np.load(tmp_path / 'out.npz') as found:
    assert found['layer_-2'].shape == (2, 16)
