"""From a configuration's data section to opened corpora: mixtures, raw text, several processes."""

import errno
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from etils import epath

from bertjax.data import build, corpus, encoding, mixture, pipeline, prepare, pretrain, shards
from bertjax.data import tokenizer as tokenizer_lib

LOW = ['river', 'mill', 'boat', 'fog', 'bell', 'tower']
HIGH = ['judge', 'court', 'clause', 'law', 'oath', 'rule']
VOCABULARY = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '.', *LOW, *HIGH]


def write_text(path, words, count, seed=0):
  """Documents of a few sentences each, one a line."""
  rng = random.Random(seed)
  documents = [
      '\n'.join(' '.join(rng.choices(words, k=rng.randint(3, 9))) + '.' for _ in range(4))
      for _ in range(count)
  ]
  path.write_text('\n\n'.join(documents) + '\n', encoding='utf-8')
  return path


def build_shards(folder, words, count, vocabulary=VOCABULARY):
  folder.mkdir()
  text = write_text(folder / 'text.txt', words, count)
  (folder / 'vocab.txt').write_text('\n'.join(vocabulary) + '\n', encoding='utf-8')
  build.build(build.BuildSettings(
      inputs=(str(text),), tokenizer=str(folder / 'vocab.txt'), output=str(folder / 'shards'),
      read=corpus.ReadSettings(format='sentences'), heldout=0.1))
  return str(folder / 'shards')


# --- Opening ---------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  root = tmp_path_factory.mktemp('mixture')
  return (build_shards(root / 'low', LOW, 300), build_shards(root / 'high', HIGH, 60))


def test_two_folders_are_mixed_by_weights(folders):
  corpora = prepare.open_corpora(folders)
  tokenizer = corpora.tokenizer
  stream = pretrain.ExampleStream(
      corpora.train, tokenizer, pretrain.PretrainSettings(seq_length=32, masked_lm_prob=0.01),
      weights=[0.25, 0.75])
  text = stream.batch(np.arange(mixture.CYCLE))['input_ids']
  low, high = ([tokenizer.token_id(word) for word in words] for words in (LOW, HIGH))
  is_low, is_high = np.isin(text, low).sum(1), np.isin(text, high).sum(1)
  # One masked token of a row may be a random word of the other corpus.
  assert ((is_low <= 1) | (is_high <= 1)).all()
  assert (is_high > is_low).mean() == pytest.approx(0.75, abs=0.02)
  heldout = pretrain.ExampleStream(
      corpora.heldout, tokenizer, stream.settings, heldout=True)
  rows = np.concatenate([b['input_ids'] for b in pipeline.heldout_batches(heldout, 16)])
  assert np.isin(rows, low).any() and np.isin(rows, high).any()


def test_corpora_together(folders):
  one, other, both = (prepare.open_corpora(f) for f in (folders[:1], folders[1:], folders))
  assert len({c.content_hash for c in (one, other, both)}) == 3
  assert one.content_hash == shards.load_manifest(folders[0]).content_hash
  assert prepare.open_corpora(folders[::-1]).content_hash != both.content_hash
  assert len(both.train) == len(both.heldout) == 2
  share = one.train[0].num_tokens / sum(split.num_tokens for split in both.train)
  assert both.unigram_entropy == pytest.approx(
      share * one.unigram_entropy + (1 - share) * other.unigram_entropy)
  assert tokenizer_lib.load(both.tokenizer_folder).hash() == both.tokenizer.hash()


def test_folders_of_different_tokenizers_are_refused(folders, tmp_path):
  other = build_shards(tmp_path / 'other', LOW, 30, [*VOCABULARY, 'extra'])
  with pytest.raises(prepare.DataError, match='another tokenizer') as raised:
    prepare.open_corpora((*folders, other))
  assert other in str(raised.value) and '--tokenizer' in str(raised.value)


def test_shards_that_cannot_be_read_are_named(folders, tmp_path, monkeypatch):
  with pytest.raises(shards.ShardError, match='does not exist'):
    prepare.open_corpora((str(tmp_path / 'nowhere'),))

  def fail(path):
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

  monkeypatch.setattr(tokenizer_lib, 'load', fail)
  with pytest.raises(prepare.DataError, match='cannot read the shards.*low'):
    prepare.open_corpora(folders[:1])


def test_jax_is_not_imported():
  code = "import sys; from bertjax.data import prepare; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0


# --- From raw text ---------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path):
  return write_text(tmp_path / 'text.txt', LOW + HIGH, 40)


@pytest.fixture
def workdir(tmp_path):
  return epath.Path(tmp_path / 'workdir')


def prepared(workdir, text, **changes):
  values = {
      'inputs': str(text), 'format': 'sentences', 'language': 'en', 'tokenizer_type': 'wordpiece',
      'vocab_size': 60, 'heldout': 0.1, 'num_workers': 1,
  }
  return prepare.build_from_text(workdir, **{**values, **changes})


def contents(folder):
  files = [path for path in pathlib.Path(folder).rglob('*') if path.is_file()]
  return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_text_is_prepared_once(workdir, text, monkeypatch):
  folder = prepared(workdir, text, vocab_size=5000)
  assert folder == str(workdir / 'shards')
  # The text has fewer entries than asked for; that is no difference the next time.
  assert shards.load_manifest(folder).tokenizer['vocab_size'] < 1000
  before = contents(workdir)
  monkeypatch.setattr(build, 'build', None)
  assert prepared(workdir, text, vocab_size=5000, num_workers=2) == folder
  assert contents(workdir) == before


CHANGES = [
    {'format': 'auto'}, {'language': 'de'}, {'vocab_size': 55}, {'heldout': 0.15},
    {'tokenizer_type': 'sentencepiece', 'vocab_size': 40},
]


@pytest.mark.parametrize('change', CHANGES, ids=lambda change: next(iter(change)))
def test_shards_of_other_settings_are_refused(workdir, text, change):
  folder = prepared(workdir, text)
  before = contents(workdir)
  with pytest.raises(prepare.DataError) as raised:
    prepared(workdir, text, **change)
  message = str(raised.value)
  assert all(name in message and repr(value) in message for name, value in change.items())
  assert folder in message and '--workdir' in message and 'remove' in message
  assert len(message.split('\n')) == 2 + len(change)
  assert contents(workdir) == before
  shutil.rmtree(folder)  # the mend
  prepared(workdir, text, **change)
  fresh = workdir.parent / 'fresh'
  prepared(fresh, text, **change)
  assert contents(workdir) == contents(fresh)


def test_shards_of_other_text_are_refused(workdir, text):
  prepared(workdir, text)
  other = write_text(pathlib.Path(text).with_name('other.txt'), LOW, 30)
  with pytest.raises(prepare.DataError, match='inputs: .*text.txt.* there, .*other.txt'):
    prepared(workdir, f'{text},{other}')


class Killed(BaseException):
  """Nothing that is cleaned up after."""


@pytest.mark.parametrize('writes', [1, 2, 3])
@pytest.mark.parametrize('kind', ['wordpiece', 'sentencepiece'])
def test_a_half_written_tokenizer_is_made_again(workdir, text, monkeypatch, writes, kind):
  """Killed while it writes the request, the vocabulary or the switches."""
  settings = {'tokenizer_type': kind, 'vocab_size': 40}
  written = []
  original = type(workdir).replace

  def replace(self, target):
    written.append(target)
    if len(written) == writes:
      raise Killed
    return original(self, target)

  with monkeypatch.context() as patch:
    patch.setattr(type(workdir), 'replace', replace)
    with pytest.raises(Killed):
      prepared(workdir, text, **settings)
  assert not (workdir / 'tokenizer' / 'tokenizer_config.json').exists()
  prepared(workdir, text, **settings)
  fresh = workdir.parent / 'fresh'
  prepared(fresh, text, **settings)
  assert contents(workdir) == contents(fresh)


def test_a_tokenizer_without_shards_is_used_only_for_what_it_was_trained(
    workdir, text, monkeypatch, caplog
):
  def stop(settings):
    raise Killed

  trained = []
  original = tokenizer_lib.train
  monkeypatch.setattr(
      tokenizer_lib, 'train', lambda *args: trained.append(args[1:]) or original(*args))
  for change in ({}, {}, {'heldout': 0.0}, {'vocab_size': 50}, {'tokenizer_type': 'sentencepiece',
                                                             'vocab_size': 40}):
    with monkeypatch.context() as patch, caplog.at_level('INFO'), pytest.raises(Killed):
      patch.setattr(build, 'build', stop)
      prepared(workdir, text, **change)
  assert trained == [('wordpiece', 60), ('wordpiece', 50), ('sentencepiece', 40)]
  assert caplog.text.count('was trained for other settings') == 2
  prepared(workdir, text, tokenizer_type='sentencepiece', vocab_size=40)
  assert len(trained) == 3
  assert shards.load_tokenizer(workdir / 'shards').type == 'sentencepiece'


def test_a_tokenizer_of_the_users_is_not_touched(workdir, text):
  encoding.write_files(workdir / 'tokenizer', {'vocab.txt': '\n'.join(VOCABULARY).encode()})
  before = contents(workdir)
  with pytest.raises(prepare.DataError, match='was not trained here'):
    prepared(workdir, text)
  assert contents(workdir) == before


def test_what_the_system_refuses_is_told_with_the_path(workdir, text, monkeypatch):
  pathlib.Path(workdir).write_text('no folder', encoding='utf-8')
  with pytest.raises(build.BuildError, match='tokenizer and shards in .*workdir'):
    prepared(workdir, text)
  pathlib.Path(workdir).unlink()

  def fail(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(build.units.UnitBuilder, 'build', fail)
  with pytest.raises(build.BuildError, match='shards cannot go on.*No space left'):
    prepared(workdir, text)


def test_a_bucket_gets_nothing_unfinished(tmp_path, text, monkeypatch):
  """A bucket is imitated by calling a local folder remote."""
  prepared(epath.Path(tmp_path / 'local'), text)
  temporary = tmp_path / 'temporary'
  temporary.mkdir()
  monkeypatch.setattr(prepare.tempfile, 'tempdir', str(temporary))
  monkeypatch.setattr(shards, 'is_remote', lambda path: 'bucket' in os.fspath(path))
  folders, original = [], build.units.build_units

  def spy(units, tokenizer, read, word_borders, folder, num_workers):
    folders.append(folder)
    original(units, tokenizer, read, word_borders, folder, num_workers)

  monkeypatch.setattr(build.units, 'build_units', spy)
  prepared(epath.Path(tmp_path / 'bucket'), text)
  assert len(folders) == 1 and folders[0].is_relative_to(temporary)
  assert contents(tmp_path / 'bucket') == contents(tmp_path / 'local')
  assert not list(temporary.iterdir())


# --- Several processes -----------------------------------------------------------------------


def as_processes(count, work):
  """Threads in place of processes: what each returns or raises."""
  meeting = threading.Barrier(count, timeout=60)
  results = [None] * count

  def run(index):
    names = []

    def barrier(name):
      names.append(name)
      meeting.wait()

    try:
      results[index] = work(process_index=index, process_count=count, barrier=barrier)
    except Exception as error:
      results[index] = error
    assert len(names) == 1

  threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results


def test_one_of_several_processes_builds(workdir, text, monkeypatch):
  builds, original = [], build.build
  monkeypatch.setattr(build, 'build', lambda s: builds.append(threading.get_ident()) or original(s))
  work = lambda **process: prepared(workdir, text, **process)
  assert as_processes(3, work) == [str(workdir / 'shards')] * 3
  assert as_processes(2, work) == [str(workdir / 'shards')] * 2
  assert len(builds) == 1
  assert len(prepare.open_corpora((str(workdir / 'shards'),)).train) == 1


def test_all_processes_end_where_the_first_cannot_build(workdir, text):
  first, *others = as_processes(
      3, lambda **process: prepared(workdir, text.with_name('nowhere'), **process))
  assert isinstance(first, corpus.CorpusError)
  for index, error in enumerate(others, 1):
    assert isinstance(error, prepare.DataError)
    assert f'process {index} finds no shards' in str(error) and 'process 0' in str(error)
  prepared(workdir, text)
  refused = as_processes(2, lambda **process: prepared(workdir, text, heldout=0.2, **process))
  assert all('built for other settings' in str(error) for error in refused)


def test_several_processes_need_a_barrier(workdir, text):
  with pytest.raises(ValueError, match='barrier'):
    prepared(workdir, text, process_count=2)
