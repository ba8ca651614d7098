"""The vocabulary and the casing that come along with a foreign checkpoint."""

import json

import pytest
from etils import epath
from golden import parity_transformers as models

from bertjax.convert import vocabulary
from bertjax.convert.names import ConversionError
from bertjax.data.encoding import TokenizerError
from bertjax.data.tokenizer import train

LOWER = models.vocabulary(20)
UPPER = LOWER + 'Über\n'.encode()


def found(folder, vocab=None, lowercase=None):
  return vocabulary.find(epath.Path(folder), vocab, lowercase)


def fast(path, entries, lowercase=False, **model):
  values = {
      'normalizer': {'type': 'BertNormalizer', 'lowercase': lowercase, 'strip_accents': None,
                     'handle_chinese_chars': True, 'clean_text': True},
      'pre_tokenizer': {'type': 'BertPreTokenizer'},
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
  tokenizer, files, casing, added = found(tmp_path)
  assert added == []
  assert files['vocab.txt'] == UPPER and tokenizer.vocab_size == 21
  assert not tokenizer.switches['lowercase'] and casing == 'as tokenizer.json says'
  assert tokenizer.encode('Über').tokens == ['Über']
  other = tmp_path / 'other'
  other.mkdir()
  for vocab in (tmp_path / 'tokenizer.json', tmp_path):
    assert found(other, vocab).files == files


def change(path, **values):
  """Sets keys of a file with a JSON object, or makes it."""
  before = json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}
  path.write_text(json.dumps(before | values), encoding='utf-8')


@pytest.mark.parametrize('key, part, said', [
    ('model', {'type': 'Unigram', 'vocab': []}, "model 'Unigram' instead of WordPiece"),
    ('normalizer', {'type': 'Sequence', 'normalizers': []}, "normalizer 'Sequence' instead"),
    ('normalizer', None, 'normalizer None'), ('normalizer', [], r'normalizer \[\]'),
    ('pre_tokenizer', {'type': 'Whitespace'}, "pre_tokenizer 'Whitespace'")])
def test_a_tokenizer_json_of_other_rules_is_refused_unless_the_vocabulary_is_named(
    tmp_path, key, part, said):
  fast(tmp_path / 'tokenizer.json', LOWER.decode().split())
  change(tmp_path / 'tokenizer.json', **{key: part})
  for vocab in (None, tmp_path / 'tokenizer.json'):
    with pytest.raises(TokenizerError, match=f'{said}.*name a vocab.txt.*--vocab'):
      found(tmp_path, vocab)
  (tmp_path / 'vocab.txt').write_bytes(LOWER)
  with pytest.raises(TokenizerError, match=said):
    found(tmp_path)
  assert found(tmp_path, tmp_path / 'vocab.txt').files['vocab.txt'] == LOWER


def test_the_class_that_config_json_names_counts_where_no_other_does(tmp_path):
  (tmp_path / 'vocab.txt').write_bytes(LOWER)
  change(tmp_path / 'config.json', tokenizer_class='BertJapaneseTokenizer')
  with pytest.raises(TokenizerError, match="config.json says tokenizer_class='BertJapaneseTok"):
    found(tmp_path)
  change(tmp_path / 'tokenizer_config.json', tokenizer_class='BertTokenizerFast')
  assert found(tmp_path).files['vocab.txt'] == LOWER


def test_a_class_that_says_nothing_leaves_it_to_tokenizer_json(tmp_path):
  (tmp_path / 'vocab.txt').write_bytes(LOWER)
  change(tmp_path / 'tokenizer_config.json', tokenizer_class='PreTrainedTokenizerFast')
  with pytest.raises(TokenizerError, match='there is no tokenizer.json'):
    found(tmp_path)
  fast(tmp_path / 'tokenizer.json', LOWER.decode().split())
  assert found(tmp_path).casing == 'as tokenizer.json says'


# --- Tokens that Transformers added to the vocabulary ----------------------------------------

LISTS = {
    'added_tokens.json': lambda tokens: tokens,
    'tokenizer_config.json': lambda tokens: {'added_tokens_decoder': {
        str(index): {'content': token} for token, index in tokens.items()}},
    'tokenizer.json': lambda tokens: {'added_tokens': [
        {'id': index, 'content': token} for token, index in tokens.items()]},
}


def folder_with_added(folder, name, tokens, plain=True):
  fast(folder / 'tokenizer.json', LOWER.decode().split(), lowercase=True)
  if plain:
    (folder / 'vocab.txt').write_bytes(LOWER)
  change(folder / name, **LISTS[name](tokens))


@pytest.mark.parametrize('plain', [True, False])
@pytest.mark.parametrize('name', LISTS)
def test_added_tokens_become_the_last_entries(tmp_path, name, plain):
  folder_with_added(tmp_path, name, {'covid': 21, '[PAD]': 0, '<e1>': 20}, plain)
  found_here = found(tmp_path)
  assert found_here.files['vocab.txt'] == LOWER + b'<e1>\ncovid\n'
  assert found_here.added == ['<e1>', 'covid']
  assert found_here.tokenizer.encode('Covid <e1>').ids == [21, 1, 1, 1]
  said = vocabulary.added_facts(found_here)
  assert '2 tokens' in said and ': <e1>, covid.' in said and said.endswith('never does with <e1>')
  if plain:  # who names the file wants no more than it holds
    assert found(tmp_path, tmp_path / 'vocab.txt').files['vocab.txt'] == LOWER
  change(tmp_path / 'tokenizer_config.json', do_lower_case=True)
  with pytest.raises(TokenizerError, match=f'^{tmp_path}/tokenizer_config.json says lowercase='):
    found(tmp_path, lowercase=False)


@pytest.mark.parametrize('tokens, said', [
    ({'<e1>': 21}, r'vocab.txt: its ids, with the tokens added to it \(<e1>\), are not 0 to 20'),
    ({'<e1>': 19}, r"added_tokens.json: the id 19 of the added token '<e1>' contradicts vocab.txt"),
    ({'w0': 20}, "the id 20 of the added token 'w0' contradicts"),
    ({'<e1>': 20, '<e2>': 20}, "'<e2>' contradicts"), ({'<e1>': -1}, 'not 0 to 20'),
    ({'<e1>': '20'}, 'added_tokens.json: its list of added tokens is damaged'),
    ({'<e1>': True}, 'damaged'), ({'a\nb': 20}, 'cannot be a line.*line break'),
    ({'\ud800': 20}, 'cannot be a line.*surrogates')])
def test_added_tokens_that_do_not_fit_are_refused_by_name(tmp_path, tokens, said):
  folder_with_added(tmp_path, 'added_tokens.json', tokens)
  with pytest.raises(ConversionError, match=f'{said}.*--vocab'):
    found(tmp_path)


@pytest.mark.parametrize('name, content', [
    ('tokenizer.json', {'added_tokens': [{'id': 20}]}), ('tokenizer.json', {'added_tokens': [7]}),
    ('tokenizer_config.json', {'added_tokens_decoder': {'x': {'content': 'y'}}}),
    ('tokenizer_config.json', {'added_tokens_decoder': [1]})])
def test_damaged_lists_of_added_tokens_are_refused(tmp_path, name, content):
  folder_with_added(tmp_path, name, {})
  change(tmp_path / name, **content)
  with pytest.raises(ConversionError, match=f'{name}: its list of added tokens is damaged'):
    found(tmp_path)


def test_lists_that_contradict_each_other_are_refused(tmp_path):
  folder_with_added(tmp_path, 'added_tokens.json', {'<e1>': 20, '<e2>': 21})
  change(tmp_path / 'tokenizer.json', **LISTS['tokenizer.json']({'<e1>': 21, '<e2>': 20}))
  with pytest.raises(ConversionError, match="tokenizer.json: the id 21 .*'<e1>' contradicts"):
    found(tmp_path)


def test_nothing_can_be_added_to_a_sentencepiece_model(tmp_path):
  text = [f'the river {index} runs past the mill of {index * 7} men' for index in range(60)]
  tokenizer = train(text, 'sentencepiece', 60)
  tokenizer.save(tmp_path)
  lists = LISTS['added_tokens.json']
  change(tmp_path / 'added_tokens.json', **lists({'[MASK]': tokenizer.mask_id}))
  assert found(tmp_path).tokenizer.hash() == tokenizer.hash()
  change(tmp_path / 'added_tokens.json', **lists({'<e1>': tokenizer.vocab_size}))
  with pytest.raises(ConversionError, match=r'added to spiece.model \(<e1>\).*--vocab .*spiece'):
    found(tmp_path)
  assert found(tmp_path, tmp_path / 'spiece.model').added == []


@pytest.mark.parametrize('change, said', [
    ({'type': 'BPE'}, 'BPE'), ({'continuing_subword_prefix': '@@'}, '@@'),
    ({'vocab': {'[PAD]': 0, 'a': 2}}, 'ids are not 0 to 1'), ({'vocab': ['a']}, 'no WordPiece'),
    ({'vocab': {'[PAD]': 0, 'a': 0}}, 'an id twice'), ({'vocab': {'[PAD]': '0'}}, 'no WordPiece'),
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
