"""The shard format: what is written comes back, and nothing half-written passes for a data set."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax.data import shard_writer, shards

IDS = st.lists(st.integers(0, 999), min_size=1, max_size=8)
DOCUMENTS = st.lists(st.lists(IDS, min_size=1, max_size=5), max_size=12)


def flatten(documents):
  """Nested lists of ids as (tokens, sentence_lengths, document_lengths)."""
  sentences = [sentence for document in documents for sentence in document]
  return (
      np.array([id for sentence in sentences for id in sentence], np.int32),
      np.array([len(sentence) for sentence in sentences], np.int64),
      np.array([len(document) for document in documents], np.int64),
  )


def nested(split):
  """The documents of an opened split as nested lists of ids."""
  documents = []
  for shard in split.shards:
    for first, last in zip(shard.documents[:-1], shard.documents[1:], strict=True):
      borders = shard.sentences[first : last + 1]
      documents.append(
          [
              shard.tokens[low:high].tolist()
              for low, high in zip(borders[:-1], borders[1:], strict=True)
          ]
      )
  return documents


def write_set(folder, documents, vocab_size=1000, words=None, **options):
  folder.mkdir(parents=True, exist_ok=True)
  splits = {}
  for name, content in (('train', documents), ('heldout', documents[:1])):
    borders = words if name == 'train' else None
    writer = shard_writer.ShardWriter(
        folder, name, vocab_size, word_borders=borders is not None, **options
    )
    writer.append(*flatten(content), borders)
    splits[name] = writer.close()
  manifest = shards.Manifest(
      corpus={'inputs': ['here']},
      tokenizer={'hash': 'abc', 'vocab_size': vocab_size},
      splits=splits,
      duplicates_dropped=0,
      encoding={'policy': 'strict', 'bad_lines': 0},
      unknown_token_share=0.0,
      unigram_entropy=1.0,
      word_borders=words is not None,
      content_hash=shards.content_hash(splits, 'abc'),
      bertjax_version='0',
  )
  shard_writer.write_manifest(folder, manifest)
  return manifest


@given(documents=DOCUMENTS, pieces=st.integers(1, 4), shard_tokens=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_documents_come_back_however_they_are_appended_and_cut(
    tmp_path_factory, documents, pieces, shard_tokens
):
  whole, parts = tmp_path_factory.mktemp('whole'), tmp_path_factory.mktemp('parts')
  manifest = write_set(whole, documents, shard_tokens=shard_tokens)
  assert shards.load_manifest(whole) == manifest
  assert nested(shards.open_split(whole)) == documents

  writer = shard_writer.ShardWriter(parts, 'train', 1000, shard_tokens=shard_tokens)
  for start in range(0, len(documents), pieces):
    writer.append(*flatten(documents[start : start + pieces]))
  assert writer.close() == manifest.splits['train']  # hashes included: the same bytes


@given(starts=st.lists(st.booleans(), min_size=1, max_size=70), cut=st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_word_bits_come_back(tmp_path_factory, starts, cut):
  folder = tmp_path_factory.mktemp('words')
  documents = [[[7]] for _ in starts]
  write_set(folder, documents, words=np.array(starts), shard_tokens=cut)
  found = [
      shard.word_starts(np.arange(len(shard.tokens))) for shard in shards.open_split(folder).shards
  ]
  assert np.concatenate(found).tolist() == starts
  with pytest.raises(shards.ShardError, match='--word_borders'):
    shards.open_split(folder, 'heldout').shards[0].word_starts(np.array([0]))


def test_small_ids_are_16_bit_and_large_ones_32_bit(tmp_path):
  write_set(tmp_path / 'small', [[[65535]]], vocab_size=65536)
  write_set(tmp_path / 'large', [[[65536]]], vocab_size=65537)
  assert shards.open_split(tmp_path / 'small').shards[0].tokens.dtype == np.uint16
  assert shards.open_split(tmp_path / 'large').shards[0].tokens.dtype == np.uint32
  assert nested(shards.open_split(tmp_path / 'large')) == [[[65536]]]


def test_arrays_are_read_only(tmp_path):
  write_set(tmp_path, [[[1, 2]]])
  with pytest.raises(ValueError, match='read-only'):
    shards.open_split(tmp_path).shards[0].tokens[0] = 3


def test_writer_refuses_what_does_not_add_up(tmp_path):
  writer = shard_writer.ShardWriter(tmp_path, 'train', 100)
  with pytest.raises(shards.ShardError, match='add up'):
    writer.append(np.array([1, 2]), np.array([1]), np.array([1]))
  with pytest.raises(shards.ShardError, match='empty'):
    writer.append(np.array([1]), np.array([1, 0]), np.array([2]))
  with pytest.raises(shards.ShardError, match='borders'):
    writer.append(np.array([1]), np.array([1]), np.array([1]), np.array([True]))


def test_a_folder_without_manifest_is_no_data_set(tmp_path):
  with pytest.raises(shards.ShardError, match='does not exist'):
    shards.load_manifest(tmp_path / 'nowhere')
  with pytest.raises(shards.ShardError, match='bertjax.data.build'):
    shards.load_manifest(tmp_path)
  (tmp_path / '.partial').mkdir()
  with pytest.raises(shards.ShardError, match='same build command again'):
    shards.load_manifest(tmp_path)


@pytest.mark.parametrize('text', ['', '[]', '{}', '{"version": 1, "splits": {}}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
  (tmp_path / 'manifest.json').write_text(text, encoding='utf-8')
  with pytest.raises(shards.ShardError, match='manifest.json.*build again'):
    shards.load_manifest(tmp_path)


def test_another_version_is_refused(tmp_path):
  manifest = write_set(tmp_path, [[[1]]])
  shard_writer.write_manifest(tmp_path, dataclasses.replace(manifest, version=99))
  with pytest.raises(shards.ShardError, match='version 99'):
    shards.load_manifest(tmp_path)


def test_damage_is_found(tmp_path):
  write_set(tmp_path, [[[1, 2, 3]]])
  assert list(shards.verify_files(tmp_path)) == []
  path = tmp_path / 'train-00000-of-00001.tokens.npy'
  whole = path.read_bytes()
  path.write_bytes(whole[:-1] + b'\x09')
  assert [path.name in message for message in shards.verify_files(tmp_path)] == [True]
  path.write_bytes(whole[:-2])
  with pytest.raises(shards.ShardError, match='tokens.npy'):
    shards.open_split(tmp_path)
  path.unlink()
  assert ['missing' in message for message in shards.verify_files(tmp_path)] == [True]


def test_counts_that_contradict_the_manifest_are_refused(tmp_path):
  write_set(tmp_path, [[[1, 2, 3]]])
  path = tmp_path / 'manifest.json'
  fields = json.loads(path.read_text(encoding='utf-8'))
  fields['splits']['train']['files'][0]['num_tokens'] = 4
  path.write_text(json.dumps(fields), encoding='utf-8')
  with pytest.raises(shards.ShardError, match='records'):
    shards.open_split(tmp_path)


def test_unknown_split_is_named(tmp_path):
  write_set(tmp_path, [[[1]]])
  with pytest.raises(shards.ShardError, match="'valid'.*'heldout', 'train'"):
    shards.open_split(tmp_path, 'valid')


def test_remote_shards_are_copied_once_and_checked(tmp_path, monkeypatch):
  """A bucket is imitated by calling the local folder remote."""
  source, cache = tmp_path / 'bucket', tmp_path / 'cache'
  manifest = write_set(source, [[[1, 2], [3]]])
  monkeypatch.setenv('BERTJAX_CACHE', str(cache))
  monkeypatch.setattr(shards, 'is_remote', lambda path: True)
  assert nested(shards.open_split(source)) == [[[1, 2], [3]]]
  copies = sorted(path.name for path in (cache / 'shards' / manifest.content_hash).iterdir())
  assert copies == [
      f'train-00000-of-00001.{name}.npy' for name in ('documents', 'sentences', 'tokens')
  ]
  (source / 'train-00000-of-00001.tokens.npy').write_bytes(b'changed')
  assert nested(shards.open_split(source)) == [[[1, 2], [3]]]  # from the cache
  monkeypatch.setenv('BERTJAX_CACHE', str(tmp_path / 'other'))
  with pytest.raises(shards.ShardError, match='damaged'):
    shards.open_split(source)
  assert not list((tmp_path / 'other').rglob('*tokens*'))


def test_the_identity_depends_on_content_and_tokenizer(tmp_path):
  one = write_set(tmp_path / 'one', [[[1, 2]]])
  same = write_set(tmp_path / 'same', [[[1, 2]]])
  other = write_set(tmp_path / 'other', [[[1], [2]]])
  assert one.content_hash == same.content_hash != other.content_hash
  assert shards.content_hash(one.splits, 'def') != one.content_hash


def test_released_pages_are_read_again(tmp_path):
  documents = [[[i % 999] * 5] * 3 for i in range(2000)]
  write_set(tmp_path, documents)
  split = shards.open_split(tmp_path)
  before = nested(split)
  shards.release_pages(split)
  assert nested(split) == before
  in_memory = shards.Shard(*(np.asarray(a).copy() for a in (
      split.shards[0].tokens, split.shards[0].sentences, split.shards[0].documents)))
  shards.release_pages(shards.Split((in_memory,), 2000, 6000, 30_000))  # nothing to release
