"""What both kinds share: the protocol, stored switches, saving, the command line."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from bertjax.data import tokenizer as tokenizer_module
from bertjax.data.tokenizer import Tokenizer, TokenizerError, load, main, train

TEXT = ['Der Müller möchte mahlen, möchte er nicht?', 'The miller would mill at the mill.'] * 8
SPECIALS = '[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n'


@pytest.fixture(params=['wordpiece', 'sentencepiece'])
def kind(request):
  return request.param


def vocabulary(folder, entries, name='vocab.txt'):
  path = folder / name
  path.write_bytes((SPECIALS + ''.join(f'{entry}\n' for entry in entries)).encode())
  return path


def test_protocol(kind):
  tokenizer = train(TEXT, kind, 100)
  assert isinstance(tokenizer, Tokenizer)
  assert tokenizer.type == kind
  assert tokenizer.continuation.shape == (tokenizer.vocab_size,)
  assert tokenizer.ordinary_ids.dtype == np.int32
  assert len(set(tokenizer.special_ids) | {tokenizer.unk_id}) == 5
  assert tokenizer.token_id(tokenizer.token(7)) == 7
  assert tokenizer.token_id('no such piece') is None
  [ids] = tokenizer.encode_batch(['the miller'])
  assert ids.dtype == np.int32


def test_save_and_load_keep_everything(kind, tmp_path):
  hashes = set()
  for lowercase in (True, False):
    for strip_accents in (True, False):
      folder = tmp_path / f'{lowercase}-{strip_accents}'
      tokenizer = train(TEXT, kind, 100, lowercase=lowercase, strip_accents=strip_accents)
      tokenizer.save(folder)
      again = load(folder)
      assert again.hash() == tokenizer.hash()
      assert again.switches == tokenizer.switches
      assert again.encode(TEXT[0]) == tokenizer.encode(TEXT[0])
      assert sorted(os.listdir(folder)) == sorted(
        ['tokenizer_config.json', 'vocab.txt' if kind == 'wordpiece' else 'spiece.model']
      )
      hashes.add(tokenizer.hash())
  assert len(hashes) == 4


def test_every_switch_is_in_the_hash_and_stored(tmp_path):
  path = vocabulary(tmp_path, ['a'])
  plain = load(path)
  changes = {'lowercase': False, 'strip_accents': False, 'split_cjk': False, 'clean_text': False,
             'max_chars_per_word': 100}
  for name, value in changes.items():
    other = load(path, **{'strip_accents': True, name: value})
    assert other.hash() != plain.hash(), name
    other.save(tmp_path / name)
    assert load(tmp_path / name).switches == other.switches
    assert other.switches[name] == value


def test_b022_accents_and_case_are_two_switches(kind, tmp_path):
  default = train(TEXT, kind, 100)
  assert default.switches['lowercase'] is True
  assert default.switches['strip_accents'] is True
  assert 'ö' not in ''.join(default.encode('möchte').tokens)
  train(TEXT, kind, 100, lowercase=True, strip_accents=False).save(tmp_path)
  again = load(tmp_path)
  assert 'ö' in ''.join(again.encode('MÖCHTE').tokens)
  config = json.loads((tmp_path / 'tokenizer_config.json').read_text(encoding='utf-8'))
  assert config['do_lower_case'] is True
  assert config.get('strip_accents') is False or config.get('keep_accents') is True


class TestB023:
  """Casing comes from what is stored."""

  def test_b023_capitals_and_nothing_said(self, tmp_path):
    path = vocabulary(tmp_path, ['river', 'Mill'])
    with pytest.raises(TokenizerError, match=r"has capitals \('Mill'\)"):
      load(path)
    assert load(path, lowercase=False).encode('Mill').tokens == ['Mill']
    assert load(path, lowercase=True).encode('River').tokens == ['river']

  def test_b023_the_real_cased_vocabulary(self, golden):
    folder = golden / '04_tokenize'
    with pytest.raises(TokenizerError, match='has capitals'):
      load(folder / 'vocab_cased.txt')
    assert load(folder / 'vocab_uncased.txt').switches['lowercase'] is True

  def test_b023_stored_casing_is_used_and_may_not_be_contradicted(self, tmp_path):
    path = vocabulary(tmp_path, ['river', 'Mill'])
    (tmp_path / 'tokenizer_config.json').write_text(
      '{"do_lower_case": false, "strip_accents": null, "model_max_length": 512}', encoding='utf-8'
    )
    for place in (tmp_path, path):
      tokenizer = load(place)
      assert tokenizer.encode('Mill').tokens == ['Mill']
      assert tokenizer.switches['strip_accents'] is False
      assert load(place, lowercase=False).hash() == tokenizer.hash()
      with pytest.raises(TokenizerError, match='says lowercase=False, but lowercase=True'):
        load(place, lowercase=True)

  def test_b023_special_names_are_no_capitals(self, tmp_path):
    assert load(vocabulary(tmp_path, ['[unused0]', 'river'])).switches['lowercase'] is True


class TestLoadErrors:
  def test_nothing_there(self, tmp_path):
    with pytest.raises(TokenizerError, match='no such file or folder'):
      load(tmp_path / 'absent')
    with pytest.raises(TokenizerError, match='neither vocab.txt nor spiece.model'):
      load(tmp_path)

  def test_both_there(self, tmp_path):
    vocabulary(tmp_path, ['a'])
    (tmp_path / 'spiece.model').write_bytes(b'x')
    with pytest.raises(TokenizerError, match='both vocab.txt and spiece.model'):
      load(tmp_path)
    assert load(tmp_path / 'vocab.txt').vocab_size == 6

  def test_broken_config(self, tmp_path):
    vocabulary(tmp_path, ['a'])
    (tmp_path / 'tokenizer_config.json').write_text('{', encoding='utf-8')
    with pytest.raises(TokenizerError, match='not JSON'):
      load(tmp_path)

  @pytest.mark.parametrize('values, said', [
    ({'word_tokenizer_type': 'mecab'}, "word_tokenizer_type='mecab'"),
    ({'subword_tokenizer_type': 'character'}, "subword_tokenizer_type='character'"),
    ({'do_basic_tokenize': False}, 'do_basic_tokenize=False'),
    ({'tokenizer_class': 'BertJapaneseTokenizer'}, "tokenizer_class='BertJapaneseTokenizer'"),
    ({'tokenizer_class': 7}, 'tokenizer_class=7'),
  ])
  def test_rules_that_are_not_ours(self, tmp_path, values, said):
    path = vocabulary(tmp_path, ['a'])
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(values), encoding='utf-8')
    with pytest.raises(TokenizerError, match=f'tokenizer_config.json says {said}; .*full path'):
      load(tmp_path)
    assert load(path).vocab_size == 6  # who names the file wants our rules

  @pytest.mark.parametrize('values', [
    {'word_tokenizer_type': 'basic', 'subword_tokenizer_type': 'wordpiece'},
    {'do_basic_tokenize': True, 'tokenizer_class': 'DistilBertTokenizerFast'},
    {'do_basic_tokenize': None, 'tokenizer_class': None, 'word_tokenizer_type': None},
  ])
  def test_rules_that_are_ours_in_other_words(self, tmp_path, values):
    vocabulary(tmp_path, ['a'])
    config = json.dumps({'do_lower_case': False, **values})
    # Windows may put a byte order mark before it.
    (tmp_path / 'tokenizer_config.json').write_text(config, encoding='utf-8-sig')
    assert load(tmp_path).switches['lowercase'] is False

  def test_a_config_that_is_no_object(self, tmp_path):
    vocabulary(tmp_path, ['a'])
    (tmp_path / 'tokenizer_config.json').write_text('[]', encoding='utf-8')
    with pytest.raises(TokenizerError, match='tokenizer_config.json: holds list'):
      load(tmp_path)

  def test_unknown_switch(self, tmp_path):
    with pytest.raises(TypeError, match='no switch lower_case'):
      load(vocabulary(tmp_path, ['a']), lower_case=True)

  def test_unknown_type(self):
    with pytest.raises(TokenizerError, match="type 'bpe' is neither"):
      train(TEXT, 'bpe', 100)


def run(*arguments, stdin=b'', **environment):
  return subprocess.run(
    [sys.executable, '-m', 'bertjax.data.tokenizer', *map(str, arguments)],
    input=stdin, capture_output=True, env={**os.environ, **environment}, check=False,
  )  # fmt: skip


ENDLESS = """
import runpy, time
from bertjax.data import corpus

def iter_text(*args):
  yield 'the river'
  print('reading', flush=True)
  time.sleep(1000)
  yield 'the mill'

corpus.iter_text = iter_text
runpy.run_module('bertjax.data.tokenizer', run_name='__main__')
"""


@pytest.fixture
def text_file(tmp_path):
  path = tmp_path / 'text.txt'
  path.write_text('\n'.join(TEXT), encoding='utf-8')
  return path


def test_b006_the_locale_has_no_say(kind, tmp_path, text_file):
  """And another process, so with other hash seeds, learns the same vocabulary."""
  line = 'Möchte der Müller?\u2028 水\n'.encode()
  outputs = []
  for name, environment in {
    'utf8': {'PYTHONHASHSEED': '1', 'PYTHONUTF8': '1'},
    'c': {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0', 'PYTHONHASHSEED': '2'},
  }.items():
    folder = tmp_path / name
    trained = run('train', '--input', text_file, '--type', kind, '--vocab_size', 90,
                  '--keep_accents', '--output', folder, **environment)
    assert trained.returncode == 0, trained.stderr
    encoded = run('encode', '--tokenizer', folder, stdin=line, **environment)
    assert encoded.returncode == 0, encoded.stderr
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    outputs.append((files, encoded.stdout))
  assert outputs[0] == outputs[1]
  row = json.loads(outputs[0][1])
  assert 'ö' in ''.join(row['tokens'])
  assert row.keys() == {'ids', 'tokens', 'offsets', 'word_starts'}


class TestCommandLine:
  def test_encode_prints_a_line_each(self, tmp_path):
    path = vocabulary(tmp_path, ['the', 'mill', '##s', '[', ']', 'mask'])
    done = run('encode', '--tokenizer', path, stdin=b'The mills\r\n\n[MASK]')
    rows = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [row['tokens'] for row in rows] == [['the', 'mill', '##s'], [], ['[', 'mask', ']']]
    assert rows[0]['offsets'] == [[0, 3], [4, 8], [8, 9]]
    assert rows[0]['word_starts'] == [True, True, False]
    for flag in ('--special_text', '--mask_token'):
      done = run('encode', '--tokenizer', path, flag, stdin=b'[MASK]')
      assert json.loads(done.stdout)['ids'] == [4]

  def test_bad_bytes_are_named(self, tmp_path):
    done = run('encode', '--tokenizer', vocabulary(tmp_path, ['a']), stdin=b'ok\nab\xe9\n')
    assert done.returncode == 2
    assert b'standard input, line 2: not UTF-8 at byte 2' in done.stderr
    assert b'Traceback' not in done.stderr

  @pytest.mark.parametrize('arguments', [
    ['encode', '--tokenizer', 'absent'],
    ['train', '--input', 'absent.txt', '--output', 'out'],
  ])  # fmt: skip
  def test_bad_input_is_one_message(self, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: ')
    assert 'absent' in error
    assert not os.listdir(tmp_path)

  def test_bad_usage(self, capsys):
    with pytest.raises(SystemExit) as exit_info:
      main(['train', '--output', 'out'])
    assert exit_info.value.code == 2
    assert '--input' in capsys.readouterr().err

  @pytest.mark.parametrize('kinds', [
    ('wordpiece', 'wordpiece'), ('wordpiece', 'sentencepiece'), ('sentencepiece', 'wordpiece'),
  ])  # fmt: skip
  def test_a_tokenizer_is_only_replaced_when_asked(self, kinds, tmp_path, text_file, capsys):
    folder = tmp_path / 'tok'
    command = ['train', '--input', str(text_file), '--vocab_size', '90', '--output', str(folder)]
    assert main([*command, '--type', kinds[0]]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / 'notes').write_text('of the user', encoding='utf-8')
    again = [*command, '--type', kinds[1], '--keep_accents']
    capsys.readouterr()
    assert main(again) == 2
    error = capsys.readouterr().err
    assert 'holds a tokenizer already' in error and '--overwrite' in error
    assert before.items() <= {path.name: path.read_bytes() for path in folder.iterdir()}.items()
    assert main([*again, '--overwrite']) == 0
    assert load(folder).type == kinds[1]
    assert load(folder).switches['strip_accents'] is False
    assert len(list(folder.iterdir())) == 3  # with the notes

  def test_an_output_that_is_a_file_is_refused_before_training(
    self, tmp_path, text_file, capsys, monkeypatch
  ):
    monkeypatch.setattr(tokenizer_module, 'train', None)
    for output in (text_file, text_file / 'tok'):
      assert main(['train', '--input', str(text_file), '--output', str(output)]) == 2
      assert f'{text_file} is a file; name a folder' in capsys.readouterr().err

  def test_an_interrupt_is_one_line(self, kind, tmp_path):
    """Also while a trainer in another language is at work, which does not hear it."""
    process = subprocess.Popen(
      [sys.executable, '-c', ENDLESS, 'train', '--input', 'x', '--type', kind, '--output',
       str(tmp_path / 'tok')],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding='utf-8',
    )  # fmt: skip
    assert process.stdout.readline() == 'reading\n'
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (130, 'interrupted\n')
    assert not (tmp_path / 'tok').exists()

  def test_train_says_what_it_made(self, kind, tmp_path, text_file, capsys):
    folder = tmp_path / 'tok'
    arguments = ['train', '--input', str(text_file), '--type', kind, '--vocab_size', '90',
                 '--no_lowercase', '--output', str(folder)]
    assert main(arguments) == 0
    tokenizer = load(folder)
    out = capsys.readouterr().out
    assert tokenizer.hash()[:16] in out
    assert f'{tokenizer.vocab_size} entries' in out
    assert tokenizer.switches['lowercase'] is False


@pytest.mark.parametrize('only_long', [False, True])
def test_b011_wordpiece_leaves_no_line_out(bugs, only_long, caplog):
  lines = (bugs / 'spm_longlines.txt').read_text(encoding='utf-8').split('\n')[:-1]
  lines = [line for line in lines if len(line.encode()) > 4192] if only_long else lines
  with caplog.at_level('INFO', logger='absl'):
    tokenizer = train(lines, 'wordpiece', 200)
  assert '0 lines left out' in caplog.text
  assert f'from {sum(len(line.split()) for line in lines)} words' in caplog.text
  for line in lines:
    assert tokenizer.unk_id not in tokenizer.encode(line).ids


def test_importing_is_light():
  """Reading shards needs no trainer: neither package is imported before it is used."""
  code = (
    f'import sys, {tokenizer_module.__name__} as t;'
    "heavy = {'tokenizers', 'sentencepiece', 'tensorflow', 'jax'} & sys.modules.keys();"
    'sys.exit(str(heavy) if heavy else 0)'
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, check=False)
  assert done.returncode == 0, done.stderr
