"""The vocabulary and the casing that come along with a foreign checkpoint."""

import json

import pytest
from etils import epath
from golden import parity_transformers as models

from bertjax.convert import vocabulary
from bertjax.convert.names import ConversionError
from bertjax.data.encoding import TokenizerError

LOWER = models.vocabulary(20)
UPPER = LOWER + 'Über\n'.encode()


def found(folder, vocab=None, lowercase=None):
  return vocabulary.find(epath.Path(folder), vocab, lowercase)


def fast(path, entries, lowercase=False, **model):
  values = {
      'normalizer': {'type': 'BertNormalizer', 'lowercase': lowercase, 'strip_accents': None,
                     'handle_chinese_chars': True, 'clean_text': True},
      'added_tokens': [{'id': 0, 'content': '[PAD]'}],
      'model': {'type': 'WordPiece', 'continuing_subword_prefix': '##',
                'max_input_chars_per_word': 100,
                'vocab': {entry: index for index, entry in enumerate(entries)}, **model}}
  path.write_text(json.dumps(values), encoding='utf-8')


@pytest.mark.parametrize('name, lowercase', [
    ('uncased_L-2_H-128_A-2', True), ('multi_cased_L-12_H-768_A-12', False),
    ('BERT-base-Cased', False), ('BERT-base-Uncased', True)])
def test_the_folders_name_tells_the_casing(tmp_path, name, lowercase):
  folder = tmp_path / name
  folder.mkdir()
  (folder / 'vocab.txt').write_bytes(UPPER)
  assert found(folder).tokenizer.switches['lowercase'] == lowercase
  assert found(folder).casing == f"by the folder's name, {name}"
  assert found(folder, lowercase=not lowercase).tokenizer.switches['lowercase'] != lowercase


def test_nothing_says_the_casing(tmp_path):
  (tmp_path / 'vocab.txt').write_bytes(UPPER)
  with pytest.raises(TokenizerError, match='has capitals.*--no_lowercase'):
    found(tmp_path)
  assert not found(tmp_path, lowercase=False).tokenizer.switches['lowercase']
  (tmp_path / 'vocab.txt').write_bytes(LOWER)
  assert found(tmp_path).tokenizer.switches['lowercase']


def test_what_is_stored_counts_more_than_the_folders_name(tmp_path):
  folder = tmp_path / 'uncased'
  folder.mkdir()
  (folder / 'vocab.txt').write_bytes(UPPER)
  fast(folder / 'tokenizer.json', UPPER.decode().split(), lowercase=False)
  assert not found(folder).tokenizer.switches['lowercase']
  assert found(folder).casing == 'as tokenizer.json says'
  with pytest.raises(ConversionError, match='says lowercase=False'):
    found(folder, lowercase=True)
  (folder / 'tokenizer_config.json').write_text('{"do_lower_case": true}')
  assert found(folder).tokenizer.switches['lowercase']
  with pytest.raises(TokenizerError, match='lowercase=True, but lowercase=False is asked'):
    found(folder, lowercase=False)


def test_the_vocabulary_of_a_tokenizer_json(tmp_path):
  fast(tmp_path / 'tokenizer.json', UPPER.decode().split())
  tokenizer, files, casing = found(tmp_path)
  assert files['vocab.txt'] == UPPER and tokenizer.vocab_size == 21
  assert not tokenizer.switches['lowercase'] and casing == 'as tokenizer.json says'
  assert tokenizer.encode('Über').tokens == ['Über']
  other = tmp_path / 'other'
  other.mkdir()
  for vocab in (tmp_path / 'tokenizer.json', tmp_path):
    assert found(other, vocab).files == files


def test_a_vocabulary_beside_a_tokenizer_json_of_another_kind(tmp_path):
  (tmp_path / 'vocab.txt').write_bytes(LOWER)
  (tmp_path / 'tokenizer.json').write_text('{"model": {"type": "Unigram", "vocab": []}}')
  assert found(tmp_path).files['vocab.txt'] == LOWER


@pytest.mark.parametrize('change, said', [
    ({'type': 'BPE'}, 'BPE'), ({'continuing_subword_prefix': '@@'}, '@@'),
    ({'vocab': {'[PAD]': 0, 'a': 2}}, 'ids are not 0 to 1'), ({'vocab': ['a']}, 'no WordPiece'),
    ({'vocab': {'[PAD]': 0, 'a\nb': 1}}, 'give a vocab.txt'),
    ({'vocab': {'[PAD]': 0, 'a': 1}}, r'tokenizer.json: \[UNK\].* missing')])
def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path, change, said):
  fast(tmp_path / 'tokenizer.json', LOWER.decode().split(), **change)
  with pytest.raises(ValueError, match=said):
    found(tmp_path)


def test_no_vocabulary_or_one_named_apart(tmp_path):
  with pytest.raises(ConversionError, match='--vocab FILE'):
    found(tmp_path)
  with pytest.raises(TokenizerError, match='no such file'):
    found(tmp_path, tmp_path / 'nothing.txt')
  apart = tmp_path / 'apart'
  apart.mkdir()
  (apart / 'words.txt').write_bytes(LOWER)
  assert found(tmp_path, apart / 'words.txt').files['vocab.txt'] == LOWER
