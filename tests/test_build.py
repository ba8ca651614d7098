"""The build command: the shards hold the text, whole or not at all, the same for any workers."""

import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax.data import assembly, borders, build, corpus, shards
from bertjax.data import tokenizer as tokenizer_lib

WORDS = ['a', 'the', 'river', 'mill', 'bell', 'tower', 'boat', 'fog', 'harbor', 'clerk', 'counts',
         'rings', 'stands', 'runs', 'to', 'by', 'of']
VOCABULARY = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '.', *WORDS, '##s', '灯', '台', '守',
              'は', '岬', 'に', '##台', '##守']


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  path = tmp_path_factory.mktemp('tokenizer') / 'vocab.txt'
  path.write_text('\n'.join(VOCABULARY) + '\n', encoding='utf-8')
  return path


def make_corpus(path, num_documents, seed=0, repeats=0.0):
  """Writes documents in Google's format; a share of them repeats earlier ones."""
  rng = random.Random(seed)
  documents = []
  for _ in range(num_documents):
    if documents and rng.random() < repeats:
      documents.append(rng.choice(documents))
    else:
      lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
      documents.append([' '.join(rng.choices(WORDS, k=length)) + '.' for length in lengths])
  path.write_text('\n\n'.join('\n'.join(d) for d in documents) + '\n', encoding='utf-8')
  return documents


def run(inputs, vocabulary, output, *options, read=None, **more):
  return build.build(
      build.BuildSettings(
          inputs=tuple(map(str, inputs)),
          tokenizer=str(vocabulary),
          output=str(output),
          read=corpus.ReadSettings(**(read or {'format': 'sentences'})),
          **more,
      )
  )


def command(*arguments):
  return [sys.executable, '-m', 'bertjax.data.build', *map(str, arguments)]


def read_documents(folder, split='train'):
  documents = []
  for shard in shards.open_split(folder, split).shards:
    for first, last in zip(shard.documents[:-1], shard.documents[1:], strict=True):
      ends = shard.sentences[first : last + 1]
      documents.append(
          [shard.tokens[a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]
      )
  return documents


def contents(folder):
  folder = pathlib.Path(folder)
  return {
      path.relative_to(folder).as_posix(): path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file()
  }


# --- What is in the shards -------------------------------------------------------------------

WORD = st.sampled_from([*WORDS, 'unknown', 'rivers'])
SENTENCE = st.lists(WORD, min_size=1, max_size=6).map(' '.join)


@given(documents=st.lists(st.lists(SENTENCE, min_size=1, max_size=4), min_size=1, max_size=25))
@settings(max_examples=25, deadline=None)
def test_documents_round_trip(tmp_path_factory, vocabulary, documents):
  folder = tmp_path_factory.mktemp('build')
  text = '\n\n'.join('\n'.join(document) for document in documents)
  (folder / 'a.txt').write_text(text, encoding='utf-8')
  manifest = run([folder / 'a.txt'], vocabulary, folder / 'out', unit_bytes=50, heldout=0.1)
  tokenizer = shards.load_tokenizer(folder / 'out')
  expected = [[list(tokenizer.encode(s).ids) for s in document] for document in documents]
  unique, seen = [], set()
  for document in expected:
    key = sum(document, [])
    if tuple(key) not in seen:
      seen.add(tuple(key))
      unique.append(document)
  heldout = read_documents(folder / 'out', 'heldout')
  assert read_documents(folder / 'out') == [d for d in unique if d not in heldout]
  assert all(document in unique for document in heldout)
  assert manifest.duplicates_dropped == len(documents) - len(unique)
  assert bool(heldout) == (len(unique) >= 10)


def test_manifest_describes_the_data(tmp_path, vocabulary):
  documents = make_corpus(tmp_path / 'a.txt', 200, repeats=0.2)
  manifest = run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', heldout=0.05)
  assert manifest == shards.load_manifest(tmp_path / 'out')
  train, heldout = (read_documents(tmp_path / 'out', name) for name in ('train', 'heldout'))
  unique = len({tuple(document) for document in documents})
  assert len(train) + len(heldout) == unique
  assert manifest.duplicates_dropped == 200 - unique > 0
  ids = np.array([i for document in train for sentence in document for i in sentence])
  assert manifest.splits['train'].num_tokens == len(ids)
  shares = np.unique(ids, return_counts=True)[1] / len(ids)
  assert manifest.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())
  assert manifest.unknown_token_share == 0
  assert manifest.tokenizer['type'] == 'wordpiece'
  assert manifest.tokenizer['vocab_size'] == len(VOCABULARY)
  assert list(shards.verify_files(tmp_path / 'out')) == []
  assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == sorted(
      ['manifest.json', 'tokenizer']
      + [f'{s}-00000-of-00001.{a}.npy' for s in ('train', 'heldout')
         for a in ('tokens', 'sentences', 'documents')]
  )


def test_held_out_documents_stay_held_out_when_text_is_added(tmp_path, vocabulary):
  make_corpus(tmp_path / 'a.txt', 500, seed=1)
  make_corpus(tmp_path / 'b.txt', 500, seed=2)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'one', heldout=0.05)
  run([tmp_path / 'b.txt', tmp_path / 'a.txt'], vocabulary, tmp_path / 'two', heldout=0.05)
  one, two = (read_documents(tmp_path / name, 'heldout') for name in ('one', 'two'))
  assert 5 < len(one) < 60
  assert all(document in two for document in one)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'other', heldout=0.05, seed=1)
  assert read_documents(tmp_path / 'other', 'heldout') != one


def test_the_first_of_equal_documents_stays_in_any_number_of_buckets(
    tmp_path, vocabulary, monkeypatch
):
  make_corpus(tmp_path / 'a.txt', 300, repeats=0.5)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'one', unit_bytes=500)
  monkeypatch.setattr(assembly, '_BUCKET_DOCUMENTS', 10)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'many', unit_bytes=500)
  assert contents(tmp_path / 'one') == contents(tmp_path / 'many')


def test_sentences_without_tokens_are_none(tmp_path, vocabulary):
  (tmp_path / 'a.txt').write_text('\x07\n\nriver\n\x07\nmill\n\n\x07\n\x08\n', encoding='utf-8')
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out')
  assert [len(document) for document in read_documents(tmp_path / 'out')] == [2]


def test_documents_longer_than_a_block_are_whole(tmp_path, vocabulary, monkeypatch):
  documents = make_corpus(tmp_path / 'a.txt', 50, seed=3)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'one')
  monkeypatch.setattr(corpus, '_BLOCK_BYTES', 20)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'two')
  assert len(documents) == 50
  assert contents(tmp_path / 'one') == contents(tmp_path / 'two')


# --- Word borders ----------------------------------------------------------------------------


def test_b041_given_word_borders(tmp_path, vocabulary):
  (tmp_path / 'a.txt').write_text('灯台守 は 岬 に\nrivers mill.\n', encoding='utf-8')
  manifest = run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', word_borders='whitespace')
  assert manifest.word_borders
  shard = shards.open_split(tmp_path / 'out').shards[0]
  tokenizer = shards.load_tokenizer(tmp_path / 'out')
  tokens = [tokenizer.token(int(i)) for i in shard.tokens]
  starts = shard.word_starts(np.arange(len(tokens))).tolist()
  assert list(zip(tokens, starts, strict=True)) == [
      ('灯', True), ('台', False), ('守', False), ('は', True), ('岬', True), ('に', True),
      ('river', True), ('##s', False), ('mill', True), ('.', False),
  ]
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'plain')
  assert read_documents(tmp_path / 'plain') == read_documents(tmp_path / 'out')
  assert shards.open_split(tmp_path / 'plain').shards[0].words is None


def test_word_borders_change_no_ids(shared, tmp_path):
  vocabulary = shared / 'data' / 'vocab' / 'bert-base-uncased-vocab.txt'
  tokenizer = tokenizer_lib.load(vocabulary)
  path = shared / 'data' / 'corpus_en' / 'books' / 'Henry_David_Thoreau__Walden.md'
  lines = path.read_text(encoding='utf-8').split('\n')
  ids, counts, starts = borders.encode_words(tokenizer, lines)
  expected, expected_counts = tokenizer.encode_lines(lines)
  assert np.array_equal(ids, expected) and np.array_equal(counts, expected_counts)
  assert starts.sum() == sum(len(line.split()) for line in lines)


# --- Bug reports -----------------------------------------------------------------------------


def build_bug(bugs, name, output, caplog, **more):
  vocabulary = bugs / 'vocab_tiny.txt'
  with caplog.at_level('INFO'):
    manifest = run([bugs / name], vocabulary, output, lowercase=True, **more)
  return manifest, caplog.text


def test_b001_one_sentence_documents_are_warned_about(bugs, tmp_path, caplog):
  manifest, log = build_bug(bugs, 'corpus_double_spaced.txt', tmp_path / 'out', caplog)
  assert manifest.splits['train'].num_documents == 8
  assert 'None of the 8 documents has two sentences' in log
  assert '0 / 8' in log and 'empty line after every sentence' in log


def test_b002_one_document_is_warned_about(bugs, tmp_path, caplog):
  manifest, log = build_bug(bugs, 'corpus_onedoc.txt', tmp_path / 'out', caplog)
  assert manifest.splits['train'].num_documents == 1
  assert 'next-sentence prediction needs a second one' in log


def test_b005_policies_and_their_counts(bugs, tmp_path, caplog):
  with pytest.raises(corpus.CorpusError, match='line 2, byte offset 58'):
    build_bug(bugs, 'corpus_badutf8.txt', tmp_path / 'strict', caplog)
  assert not (tmp_path / 'strict' / 'manifest.json').exists()
  for policy in ('replace', 'ignore'):
    read = {'format': 'sentences', 'encoding_errors': policy}
    manifest, log = build_bug(bugs, 'corpus_badutf8.txt', tmp_path / policy, caplog, read=read)
    assert manifest.encoding == {'policy': policy, 'bad_lines': 3}
    assert manifest.splits['train'].num_sentences == 6
    assert '3 lines held bytes that are not UTF-8' in log


def test_b006_the_locale_changes_nothing(tmp_path, vocabulary):
  text = 'river 灯台守.\nmill é “bell”.\n\ntower fog.\n'
  (tmp_path / 'ä.txt').write_text(text, encoding='utf-8')
  plain = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
  for name, environment in (('c', plain), ('utf8', {'PYTHONUTF8': '1'})):
    arguments = ('--input', tmp_path / '*.txt', '--tokenizer', vocabulary)
    done = subprocess.run(
        command(*arguments, '--output', tmp_path / name),
        env={**os.environ, **environment}, capture_output=True, text=True, encoding='utf-8',
    )
    assert done.returncode == 0, done.stderr
  assert contents(tmp_path / 'c') == contents(tmp_path / 'utf8')


def test_b008_documents_of_dirty_text(bugs, tmp_path, caplog):
  build_bug(bugs, 'corpus_dirty.txt', tmp_path / 'out', caplog)
  assert [len(document) for document in read_documents(tmp_path / 'out')] == [2, 3, 1]


def test_b012_long_lines_and_long_runs(bugs, tmp_path, caplog):
  manifest, _ = build_bug(bugs, 'corpus_longline.txt', tmp_path / 'out', caplog)
  documents = read_documents(tmp_path / 'out')
  assert [len(document) for document in documents] == [4, 2]
  tokenizer = shards.load_tokenizer(tmp_path / 'out')
  assert len(documents[0][1]) >= 3000  # no word of the long line is lost
  assert documents[0][2].count(tokenizer.unk_id) == 1 and len(documents[0][2]) == 1
  assert manifest.unknown_token_share > 0


def test_b014_single_sentence_documents_all_stay(bugs, tmp_path, caplog):
  manifest, log = build_bug(bugs, 'corpus_onesent_docs.txt', tmp_path / 'out', caplog)
  assert manifest.splits['train'].num_documents == 6
  assert '0 / 6' in log


def test_b025_share_of_unknown_tokens_is_reported(tmp_path, vocabulary, caplog):
  (tmp_path / 'a.txt').write_text('the river♥ runs\nthe mill😀\n\n' * 50, encoding='utf-8')
  with caplog.at_level('INFO'):
    manifest = run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out')
  assert manifest.unknown_token_share == pytest.approx(2 / 5)
  assert '40.0 % of all tokens are unknown' in caplog.text


# --- Refusals --------------------------------------------------------------------------------


def test_nothing_to_build_is_said(tmp_path, vocabulary):
  with pytest.raises(corpus.CorpusError, match='no file matches'):
    run([tmp_path / '*.txt'], vocabulary, tmp_path / 'out')
  (tmp_path / 'a.txt').write_text('\n \n', encoding='utf-8')
  (tmp_path / 'b.txt').write_bytes(b'')
  for names in (['a.txt'], ['b.txt'], ['a.txt', 'b.txt']):
    with pytest.raises(build.BuildError, match='not one sentence'):
      run([tmp_path / name for name in names], vocabulary, tmp_path / 'out')
  assert not (tmp_path / 'out' / 'manifest.json').exists()


def test_a_finished_set_is_only_replaced_when_asked(tmp_path, vocabulary):
  make_corpus(tmp_path / 'a.txt', 20)
  make_corpus(tmp_path / 'b.txt', 30, seed=1)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out')
  before = contents(tmp_path / 'out')
  with pytest.raises(build.BuildError, match='--overwrite'):
    run([tmp_path / 'b.txt'], vocabulary, tmp_path / 'out')
  assert contents(tmp_path / 'out') == before
  run([tmp_path / 'b.txt'], vocabulary, tmp_path / 'out', overwrite=True)
  run([tmp_path / 'b.txt'], vocabulary, tmp_path / 'fresh')
  assert contents(tmp_path / 'out') == contents(tmp_path / 'fresh')


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path, vocabulary, capsys):
  good = tmp_path / 'a.txt'
  make_corpus(good, 20)
  cases = {
      'no file matches': ['--input', tmp_path / 'x*', '--tokenizer', vocabulary],
      'nowhere': ['--input', good, '--tokenizer', tmp_path / 'nowhere'],
      '--heldout 0.9': ['--input', good, '--tokenizer', vocabulary, '--heldout', '0.9'],
      '--num_workers 0': ['--input', good, '--tokenizer', vocabulary, '--num_workers', '0'],
  }
  for message, arguments in cases.items():
    assert build.main([*map(str, arguments), '--output', str(tmp_path / 'out')]) == 2
    errors = capsys.readouterr().err
    assert message in errors and 'Traceback' not in errors
  remote = ['--input', str(good), '--tokenizer', str(vocabulary), '--output', 'gs://bucket/x']
  assert build.main(remote) == 2
  assert '--scratch' in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused(tmp_path, vocabulary):
  make_corpus(tmp_path / 'a.txt', 20)
  with pytest.raises(build.BuildError, match='a.txt is a file; name a folder'):
    run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'a.txt')


def test_a_build_that_finished_no_unit_leaves_nothing(tmp_path, vocabulary, caplog):
  (tmp_path / 'a.txt').write_bytes(b'Bad \xff.\n')
  for more in ({}, {'scratch': str(tmp_path / 'scratch')}):
    with pytest.raises(corpus.CorpusError), caplog.at_level('INFO'):
      run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', **more)
    assert os.listdir(tmp_path) == ['a.txt']
  (tmp_path / 'a.txt').write_text('\n \n', encoding='utf-8')
  with pytest.raises(build.BuildError, match='not one sentence'), caplog.at_level('INFO'):
    run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out')
  assert os.listdir(tmp_path) == ['a.txt'] and 'kept' not in caplog.text


def test_a_build_that_failed_says_what_is_kept(tmp_path, vocabulary, caplog):
  make_corpus(tmp_path / 'a.txt', 300)
  with (tmp_path / 'a.txt').open('ab') as file:
    file.write(b'\n\nBad \xff.\n')
  with pytest.raises(corpus.CorpusError), caplog.at_level('INFO'):
    run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', unit_bytes=2000)
  kept = len(list((tmp_path / 'out' / '.partial').glob('unit-??????')))
  said = f'{kept} finished units are kept in {tmp_path / "out" / ".partial"}: the same command'
  assert kept > 1 and said in caplog.text


def test_half_a_surrogate_pair_is_counted(tmp_path, vocabulary, caplog):
  (tmp_path / 'a.jsonl').write_text('{"text": "The river \\ud800 runs."}\n', encoding='utf-8')
  with pytest.raises(corpus.CorpusError, match='a.jsonl, line 1: .*surrogate'):
    run([tmp_path / 'a.jsonl'], vocabulary, tmp_path / 'out', read={'format': 'jsonl'})
  read = {'format': 'jsonl', 'encoding_errors': 'ignore'}
  manifest = run([tmp_path / 'a.jsonl'], vocabulary, tmp_path / 'out', read=read)
  assert manifest.encoding == {'policy': 'ignore', 'bad_lines': 1}
  assert manifest.splits['train'].num_tokens == 4


def test_a_second_build_in_the_same_folder_is_refused(tmp_path, vocabulary):
  make_corpus(tmp_path / 'a.txt', 20)
  (tmp_path / 'out' / '.partial').mkdir(parents=True)
  refused = pytest.raises(build.BuildError, match='another build is at work')
  with build._lock(tmp_path / 'out' / '.partial'), refused:
    run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out')


# --- Disks -----------------------------------------------------------------------------------


def separate_disks(monkeypatch, folder):
  """Renames into or out of `folder` fail as between two file systems."""
  for name in ('rename', 'replace'):
    original = getattr(os, name)

    def rename(source, target, original=original):
      one, other = (pathlib.Path(path).is_relative_to(folder) for path in (source, target))
      if one != other:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), str(target))
      original(source, target)

    monkeypatch.setattr(os, name, rename)


def test_scratch_may_be_on_another_disk(tmp_path, vocabulary, monkeypatch):
  make_corpus(tmp_path / 'a.txt', 200)
  make_corpus(tmp_path / 'b.txt', 300, seed=1)
  run([tmp_path / 'b.txt'], vocabulary, tmp_path / 'whole')
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out')
  (tmp_path / 'out' / '.incoming').mkdir()
  (tmp_path / 'out' / '.incoming' / 'half').write_bytes(b'of a build that was killed')
  separate_disks(monkeypatch, tmp_path / 'scratch')
  scratch = str(tmp_path / 'scratch' / 'build')
  run([tmp_path / 'b.txt'], vocabulary, tmp_path / 'out', overwrite=True, scratch=scratch)
  assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')
  assert list(shards.verify_files(tmp_path / 'out')) == []
  assert not os.path.exists(scratch) and not (tmp_path / 'out' / '.incoming').exists()


def test_a_full_disk_is_said_and_harms_no_finished_set(tmp_path, vocabulary, monkeypatch):
  make_corpus(tmp_path / 'a.txt', 200)
  make_corpus(tmp_path / 'b.txt', 300, seed=1)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out')
  before = contents(tmp_path / 'out')
  more = {'overwrite': True, 'scratch': str(tmp_path / 'scratch')}
  with monkeypatch.context() as patch:
    separate_disks(patch, tmp_path / 'scratch')
    copied = []

    def fill_up(reader, writer, length):
      copied.append(reader.name)
      if len(copied) == 4:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      writer.write(reader.read())

    patch.setattr(shutil, 'copyfileobj', fill_up)
    with pytest.raises(build.BuildError, match='No space left on device') as raised:
      run([tmp_path / 'b.txt'], vocabulary, tmp_path / 'out', **more)
  assert str(tmp_path / 'out') in str(raised.value)
  assert before.items() <= contents(tmp_path / 'out').items()
  shards.open_split(tmp_path / 'out')
  run([tmp_path / 'b.txt'], vocabulary, tmp_path / 'out', **more)
  run([tmp_path / 'b.txt'], vocabulary, tmp_path / 'fresh')
  assert contents(tmp_path / 'out') == contents(tmp_path / 'fresh')


def test_what_the_system_refuses_is_told_with_the_path(tmp_path, vocabulary, capsys):
  make_corpus(tmp_path / 'a.txt', 20)
  (tmp_path / 'file').write_text('no folder', encoding='utf-8')
  with pytest.raises(build.BuildError, match='file/out'):
    run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'file' / 'out')
  arguments = ['--input', tmp_path / 'a.txt', '--tokenizer', vocabulary, '--output']
  assert build.main([*map(str, arguments), str(tmp_path / 'file' / 'out')]) == 2
  assert 'file/out' in capsys.readouterr().err
  assert issubclass(build.units.WorkerError, build.BuildError)


# --- Workers, kills and resumption -----------------------------------------------------------


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, vocabulary):
  make_corpus(tmp_path / 'a.txt', 400, repeats=0.1)
  (tmp_path / 'b.jsonl').write_text('{"text": "The river runs. The bell rings."}\n' * 9 +
                                    '{"text": "The mill stands. It runs."}\n', encoding='utf-8')
  for workers in (1, 2, 3):
    run([tmp_path / 'a.txt', tmp_path / 'b.jsonl'], vocabulary, tmp_path / f'{workers}',
        read={'format': 'auto'}, num_workers=workers, unit_bytes=2000)
  assert contents(tmp_path / '1') == contents(tmp_path / '2') == contents(tmp_path / '3')


@pytest.mark.slow
def test_an_error_in_a_worker_reaches_the_parent(tmp_path, vocabulary):
  make_corpus(tmp_path / 'a.txt', 400)
  (tmp_path / 'b.txt').write_bytes(b'Good.\nBad \xff.\n')
  done = subprocess.run(
      command('--input', tmp_path / '*.txt', '--tokenizer', vocabulary, '--output',
              tmp_path / 'out', '--num_workers', 2, '--unit_bytes', 2000, '--format', 'sentences'),
      capture_output=True, text=True, encoding='utf-8', timeout=120,
  )
  assert done.returncode == 2
  assert 'b.txt, line 2, byte offset 10' in done.stderr and 'Traceback' not in done.stderr
  assert not (tmp_path / 'out' / 'manifest.json').exists()


def start_build(tmp_path, vocabulary, output, workers, **more):
  return subprocess.Popen(
      command('--input', tmp_path / 'a.txt', '--tokenizer', vocabulary, '--output', output,
              '--num_workers', workers, '--unit_bytes', 20_000, '--format', 'sentences'),
      stderr=subprocess.PIPE, text=True, encoding='utf-8', **more,
  )


def children(pid):
  """Ids of a process's children that are workers of its pool."""
  found = pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text(encoding='utf-8').split()
  return [
      int(child) for child in found
      if b'spawn_main' in pathlib.Path(f'/proc/{child}/cmdline').read_bytes()
  ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='finds the workers in /proc')
def test_a_worker_that_is_killed_fails_the_build(tmp_path, vocabulary):
  make_corpus(tmp_path / 'a.txt', 40_000)
  process = start_build(tmp_path, vocabulary, tmp_path / 'out', 2)
  # Not before both are at work: Python's own pool waits forever if one dies as the next is started.
  while not list((tmp_path / 'out').glob('.partial/unit-??????')) and process.poll() is None:
    time.sleep(0.01)
  os.kill(children(process.pid)[0], signal.SIGKILL)
  errors = process.communicate(timeout=120)[1]
  assert process.returncode == 2
  assert 'a worker process died' in errors and 'Traceback' not in errors
  assert not (tmp_path / 'out' / 'manifest.json').exists()


def test_a_worker_that_dies_while_the_next_is_started_fails_the_build(
    tmp_path, vocabulary, monkeypatch
):
  """What the pool then says depends on which of its pipes were closed by that time."""
  make_corpus(tmp_path / 'a.txt', 300)
  for error in (ValueError('bad value(s) in fds_to_keep'), OSError('handle is closed')):
    def submit(self, *args, error=error):
      raise error

    monkeypatch.setattr(build.units.futures.ProcessPoolExecutor, 'submit', submit)
    with pytest.raises(build.BuildError, match='a worker process died'):
      run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', num_workers=2, unit_bytes=2000)


def interrupt(process):
  """Ctrl-C in a terminal: the signal goes to the workers as well."""
  os.killpg(process.pid, signal.SIGINT)
  errors = process.communicate(timeout=120)[1]
  assert process.returncode == 130
  assert errors.endswith('interrupted\n') and 'Traceback' not in errors
  return errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='finds the workers in /proc')
@pytest.mark.parametrize('delay', [0.0, 0.05, 0.3])
def test_an_interrupt_as_workers_start_is_one_line(tmp_path, vocabulary, delay):
  make_corpus(tmp_path / 'a.txt', 2000)
  process = start_build(tmp_path, vocabulary, tmp_path / 'out', 3, start_new_session=True)
  while not children(process.pid):
    time.sleep(0.005)
  time.sleep(delay)
  interrupt(process)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='finds the workers in /proc')
def test_an_interrupt_at_work_says_what_is_waited_for(tmp_path, vocabulary):
  make_corpus(tmp_path / 'a.txt', 40_000)
  process = start_build(tmp_path, vocabulary, tmp_path / 'out', 2, start_new_session=True)
  while not list((tmp_path / 'out').glob('.partial/unit-??????')):
    time.sleep(0.01)
  errors = interrupt(process)
  assert errors.count('finishing the units at work ...') == 1
  assert 'finished unit' in errors and 'the same command goes on with' in errors


def test_an_interrupt_is_held_back_until_workers_are_started():
  before = signal.getsignal(signal.SIGINT)
  done = []
  with pytest.raises(KeyboardInterrupt), build.units._hold_interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    code = 'import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))'
    child = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    done.append(child.stdout)
  assert done == ['True\n']
  assert signal.getsignal(signal.SIGINT) is before
  assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='finds the workers in /proc')
@pytest.mark.parametrize('workers', [1, 2])
def test_a_killed_build_goes_on_to_the_same_bytes(tmp_path, vocabulary, workers):
  make_corpus(tmp_path / 'a.txt', 10_000)
  whole = start_build(tmp_path, vocabulary, tmp_path / 'whole', 1)
  assert 'error' not in whole.communicate()[1]
  units = os.path.getsize(tmp_path / 'a.txt') // 20_000
  rng = random.Random(workers)
  for done in [0, *sorted(rng.choices(range(units), k=3)), units]:
    kill_when(start_build(tmp_path, vocabulary, tmp_path / 'out', workers), tmp_path / 'out', done,
              rng.uniform(0, 0.3))
    if (tmp_path / 'out' / 'manifest.json').exists():  # Killed as it cleared up.
      assert contents(tmp_path / 'whole').items() <= contents(tmp_path / 'out').items()
      return
  assert 'done' in start_build(tmp_path, vocabulary, tmp_path / 'out', workers).communicate()[1]
  assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')


def kill_when(process, output, units_done, delay):
  """Kills a build a moment after so many units are there; its workers must end with it."""
  while process.poll() is None and len(list(output.glob('.partial/unit-??????'))) < units_done:
    time.sleep(0.01)
  time.sleep(delay)
  workers = children(process.pid) if process.poll() is None else []
  process.kill()
  process.communicate()
  wait_for_end(workers)


def wait_for_end(pids):
  deadline = time.monotonic() + 60
  while any(pathlib.Path(f'/proc/{pid}').exists() for pid in pids):
    assert time.monotonic() < deadline, f'worker processes {pids} outlive the build'
    time.sleep(0.05)


def interrupt_after_units(monkeypatch, count):
  """Makes the process stop, as if killed, when `count` units are done."""
  original, done = build.units.UnitBuilder.build, []

  def stop(self, number, unit):
    if len(done) == count:
      raise KeyboardInterrupt
    done.append(number)
    original(self, number, unit)

  monkeypatch.setattr(build.units.UnitBuilder, 'build', stop)
  return done


def test_finished_units_are_kept_and_others_made(tmp_path, vocabulary, monkeypatch, caplog):
  make_corpus(tmp_path / 'a.txt', 300)
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'whole', unit_bytes=2000)
  with monkeypatch.context() as patch:
    interrupt_after_units(patch, 3)
    with pytest.raises(KeyboardInterrupt):
      run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', unit_bytes=2000)
  partial = tmp_path / 'out' / '.partial'
  (partial / 'unit-000001' / 'tokens').write_bytes(b'')  # as a power cut may leave it
  (partial / 'unit-000009.77.partial').mkdir()
  with monkeypatch.context() as patch, caplog.at_level('INFO'):
    made = interrupt_after_units(patch, 1000)
    run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', unit_bytes=2000)
  assert made[:2] == [1, 3]
  assert 'Going on with an interrupted build: 2 of' in caplog.text
  assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')


@pytest.mark.parametrize('change', ['input', 'setting', 'tokenizer'])
def test_a_changed_input_or_setting_starts_anew_and_says_so(
    tmp_path, vocabulary, monkeypatch, caplog, change
):
  make_corpus(tmp_path / 'a.txt', 300)
  with monkeypatch.context() as patch:
    interrupt_after_units(patch, 3)
    with pytest.raises(KeyboardInterrupt):
      run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', unit_bytes=2000)
  more = {}
  if change == 'input':
    make_corpus(tmp_path / 'a.txt', 300, seed=5)
  elif change == 'setting':
    more['word_borders'] = 'whitespace'
  else:
    other = tmp_path / 'vocab.txt'
    other.write_text('\n'.join([*VOCABULARY, 'extra']) + '\n', encoding='utf-8')
    vocabulary = other
  with caplog.at_level('INFO'):
    run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'out', unit_bytes=2000, **more)
  assert 'have changed since the interrupted build' in caplog.text
  run([tmp_path / 'a.txt'], vocabulary, tmp_path / 'fresh', unit_bytes=2000, **more)
  assert contents(tmp_path / 'out') == contents(tmp_path / 'fresh')


# --- Memory ----------------------------------------------------------------------------------

PEAK = """
import sys, threading, time
from bertjax.data import build
peak = 0
def watch():
  global peak
  while True:
    for line in open('/proc/self/status', encoding='utf-8'):
      if line.startswith('RssAnon'):
        peak = max(peak, int(line.split()[1]))
    time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
status = build.main(sys.argv[1:])
print(peak)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='reads RssAnon in /proc')
def test_b004_memory_does_not_grow_with_the_corpus(tmp_path, vocabulary):
  peaks = []
  for number, size in enumerate((6, 60)):
    make_corpus(tmp_path / 'part.txt', 5000, seed=number)
    part = (tmp_path / 'part.txt').read_text(encoding='utf-8')
    path = tmp_path / f'{number}.txt'
    with path.open('w', encoding='utf-8') as file:
      for copy in range(size * 10**6 // len(part)):
        # Half of the documents differ from copy to copy, the others are duplicates.
        file.write(part.replace('the', str(copy), 1) + '\n')
    done = subprocess.run(
        [sys.executable, '-c', PEAK, '--input', path, '--tokenizer', vocabulary, '--output',
         tmp_path / f'out{number}', '--format', 'sentences', '--unit_bytes', '1000000'],
        capture_output=True, text=True, encoding='utf-8', check=True,
    )
    peaks.append(int(done.stdout))
  assert peaks[1] < 1.2 * peaks[0], peaks
  assert json.loads((tmp_path / 'out1' / 'manifest.json').read_text(encoding='utf-8'))
