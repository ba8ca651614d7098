"""CoNLL files, windows in which every word counts once, and prediction files."""

import collections

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertjax.data import tagging, tokenizer
from bertjax.data.tagging import TaggingError

TEXT = ['the cat sits on the mill and sings', 'it sleeps a lot', 'she says no to the boat'] * 4
CONLL = 'EU\tB-ORG\nrejects\tO\n\nGerman\tB-MISC\nlamb\tI-MISC\n.\tO\n'


@pytest.fixture(scope='module')
def words():
  return tokenizer.train(TEXT, 'wordpiece', 120)


def written(folder, text, name='train.conll'):
  path = folder / name
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


def read(folder, text, **more):
  return tagging.read(written(folder, text), **more)


def make(tokens, tags=None) -> tagging.Sentences:
  lines, line = [], 1
  for row in tokens:
    lines.append(list(range(line, line + len(row))))
    line += len(row) + 1
  return tagging.Sentences('made', tokens, tags, lines, 'bio')


# --- Reading -----------------------------------------------------------------------------------


def test_reads_tokens_tags_and_lines(tmp_path):
  sentences = read(tmp_path, CONLL)
  assert sentences.tokens == [['EU', 'rejects'], ['German', 'lamb', '.']]
  assert sentences.tags == [['B-ORG', 'O'], ['B-MISC', 'I-MISC', 'O']]
  assert sentences.lines == [[1, 2], [4, 5, 6]]
  assert (sentences.scheme, sentences.wrong_transitions, len(sentences)) == ('bio', 0, 2)


@pytest.mark.parametrize('text', [
    '\ufeff' + CONLL, CONLL.replace('\n', '\r\n'), CONLL.replace('\t', ' '),
    CONLL.replace('\t', '   ').replace('\n\n', '\n \n'), '\n\n' + CONLL + '\n\n', CONLL[:-1],
    CONLL.replace('\n\n', '\n\t\n\n \t \n'), '-DOCSTART-\tO\n\n' + CONLL,
    CONLL.replace('\n\n', '\n-DOCSTART- -X- O O\n'), '# id = 1\n# text\n' + CONLL,
])
def test_the_same_sentences_in_other_clothes(tmp_path, text):
  plain, dressed = read(tmp_path, CONLL), read(tmp_path, text)
  assert (dressed.tokens, dressed.tags) == (plain.tokens, plain.tags)


def test_hash_signs_are_tokens_where_they_have_a_tag(tmp_path):
  assert read(tmp_path, '#\tO\n#a\tB-X\n').tokens == [['#', '#a']]
  assert read(tmp_path, '# O\nb O\n').tokens == [['#', 'b']]
  assert read(tmp_path, '# a comment\n#\tO\n').tokens == [['#']]


def test_only_line_feeds_end_lines(tmp_path):
  sentences = read(tmp_path, 'a\u2028b\tO\n\x85\u00a0c\tO\nd\re\tO\n')
  assert sentences.tokens == [['a\u2028b', '\x85\u00a0c', 'd\re']]


def test_columns_can_be_chosen(tmp_path):
  text = '1 EU NNP B-NP B-ORG\n2 is VBZ B-VP O\n'
  assert read(tmp_path, text, token_column=1).tags == [['B-ORG', 'O']]
  chunks = read(tmp_path, text, token_column=1, tag_column=3)
  assert (chunks.tokens, chunks.tags) == ([['EU', 'is']], [['B-NP', 'B-VP']])
  assert read(tmp_path, text, token_column=-4, tag_column=None).tags is None
  plain = read(tmp_path, text, token_column=1, tag_column=2, scheme='plain')
  assert (plain.tags, plain.scheme) == ([['NNP', 'VBZ']], 'plain')


def test_files_without_tags(tmp_path):
  for text in ('a\nb\n\nc\n', 'a\t\nb\t\n\nc\t\n'):
    sentences = read(tmp_path, text)
    assert (sentences.tokens, sentences.tags) == ([['a', 'b'], ['c']], None)
  with pytest.raises(TaggingError, match='no tags to learn from'):
    tagging.label_list(sentences)


def test_iob1_becomes_bio(tmp_path, caplog):
  text = 'a I-X\nb I-X\nc B-X\nd I-Y\ne O\n\nf I-X\n'
  with caplog.at_level('INFO'):
    sentences = read(tmp_path, text)
  assert sentences.tags == [['B-X', 'I-X', 'B-X', 'B-Y', 'O'], ['B-X']]
  assert (sentences.scheme, sentences.wrong_transitions) == ('iob1', 0)
  assert 'scheme iob1 (by its tags)' in caplog.text
  assert read(tmp_path, text, scheme='iob1').tags == sentences.tags
  kept = read(tmp_path, text, scheme='bio')
  assert kept.tags == [['I-X', 'I-X', 'B-X', 'I-Y', 'O'], ['I-X']]
  assert kept.wrong_transitions == 3


def test_wrong_transitions_in_bio_are_counted_and_kept(tmp_path, caplog):
  with caplog.at_level('INFO'):
    sentences = read(tmp_path, 'a B-X\nb I-Y\nc O\nd I-X\ne I-X\n\nf I-X\n')
  assert (sentences.scheme, sentences.wrong_transitions) == ('bio', 3)
  assert sentences.tags == [['B-X', 'I-Y', 'O', 'I-X', 'I-X'], ['I-X']]
  assert '3 I- tags that follow no entity of their type' in caplog.text


def test_tags_without_a_type(tmp_path):
  assert read(tmp_path, 'a B\nb I\nc O\n').tags == [['B', 'I', 'O']]
  assert read(tmp_path, 'a O\nb I\nc I\n').tags == [['O', 'B', 'I']]


def test_label_list():
  assert tagging.label_list(make([['a'] * 4], [['I-B', 'O', 'B-B', 'B-A']])) == [
      'O', 'B-A', 'B-B', 'I-B']
  assert tagging.label_list(make([['a'] * 2], [['VB', 'NN']])) == ['NN', 'VB']


@pytest.mark.parametrize('content, said', [
    (b'\x1f\x8b\x08\xff\xff', 'line 1: not UTF-8 text at byte 1'),
    (b'a\tO\nb\xe9\tO', 'line 2: not UTF-8 text at byte 5'),
    (b'a\tO\n\0\tO', 'line 2: a NUL byte'),
    ('', 'no sentences'), ('\n \n-DOCSTART- O\n', 'no sentences'),
    ('a\tO\nb O\n', "line 2: 1 columns ('b O'), but line 1 has 2"),
    ('a O\nb B- LOC\n', "line 2: 3 columns ('b B- LOC'), but line 1 has 2"),
    ('a\tO\n# no comment here\n', 'line 2: 1 columns'),
    ('a\tO\n\tO\n', 'line 2: no token'),
    ('a\tO\n\nb\t\n', 'line 3: no tag'),
    ('a\tO\nb\tX\n', "line 2: tag 'X' is none of O, B-TYPE and I-TYPE"),
    ('a\tS-PER\n', "tag 'S-PER'"), ('a\tB-\n', "tag 'B-'"), ('a\to\n', "tag 'o'"),
    ('river NN\n', 'a file whose columns hold no tags, set data.test_has_tags=False'),
    ('{"tokens": ["a"], "tags": ["O"]}\n', "tag '[\"O\"]}'"),
])
def test_hostile_files(tmp_path, content, said):
  path = written(tmp_path, content)
  with pytest.raises(TaggingError) as error:
    tagging.read(path)
  assert str(error.value).startswith(f'{path}: ')
  assert said in str(error.value)


def test_wrong_arguments(tmp_path):
  with pytest.raises(TaggingError, match='no such file'):
    tagging.read(tmp_path / 'none')
  with pytest.raises(TaggingError, match="scheme 'iobes' is none of auto, bio"):
    read(tmp_path, CONLL, scheme='iobes')
  with pytest.raises(TaggingError, match='no column 2 for the tag; the file has 2.*test_has_tags'):
    read(tmp_path, CONLL, tag_column=2)
  with pytest.raises(TaggingError, match='no column 5 for the token.*set data.token_column$'):
    read(tmp_path, CONLL, token_column=5)


# --- Windows -----------------------------------------------------------------------------------


def test_one_window_a_short_sentence(words):
  sentences = make([['sings', 'zzz', 'mill'], ['cat']], [['B-X', 'I-X', 'O'], ['O']])
  windows = tagging.encode(sentences, words, ['O', 'B-X', 'I-X'], 32)
  assert len(windows) == len(windows.examples) == 2
  pieces = [words.encode(word).ids for word in sentences.tokens[0]]
  ids = windows.examples.tokens['input_ids'][0]
  assert ids.tolist() == [words.cls_id, *sum(pieces, []), words.sep_id]
  starts = np.cumsum([1] + [len(p) for p in pieces])[:3].tolist()
  assert windows.positions[0].tolist() == starts
  weights, labels = (windows.examples.tokens[f][0] for f in ('label_weights', 'labels'))
  assert (weights.dtype, labels.dtype) == (np.float32, np.int32)
  assert np.flatnonzero(weights).tolist() == starts
  assert labels[starts].tolist() == [1, 2, 0]
  assert np.flatnonzero(labels).tolist() == starts[:2]
  assert windows.examples.tokens['token_type_ids'][0].tolist() == [0] * len(ids)
  assert windows.examples.tokens['attention_mask'][0].tolist() == [1] * len(ids)
  assert windows.examples.pad_id == words.pad_id


def test_each_word_is_tokenized_by_itself(words):
  # Joined, 'the' and 'cat' could become other pieces; '-' would split a word but not its label.
  sentences = make([['the-cat', 'cat']])
  [ids] = tagging.encode(sentences, words, ['O'], 64).examples.tokens['input_ids']
  assert ids[1:-1].tolist() == words.encode('the-cat').ids + words.encode('cat').ids


def test_words_without_pieces_and_words_too_long(words, caplog):
  sentences = make([['\u00ad', 'cat', 'sings' * 9, '\u200b\u200d']])
  windows = tagging.encode(sentences, words, ['O'], 8)
  counted = np.concatenate(windows.words)
  assert sorted(counted.tolist()) == [0, 1, 2, 3]
  first = windows.examples.tokens['input_ids'][0]
  assert first[windows.positions[0][0]] == words.unk_id
  assert windows.examples.lengths.max() <= 8
  assert '1 different words are longer than a window and are cut to 6 pieces' in caplog.text


def test_a_word_counts_where_most_of_its_surroundings_are(words):
  # 12 words of one piece, windows of 6, stride 3: by hand.
  windows = tagging.encode(make([['cat'] * 12]), words, ['O'], 8, stride=3)
  assert windows.sentences.tolist() == [0, 0, 0]
  assert [row.tolist() for row in windows.words] == [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]]
  assert [row.tolist() for row in windows.positions] == [[1, 2, 3, 4, 5], [3, 4, 5], [3, 4, 5, 6]]


def test_no_labels_no_targets(words):
  windows = tagging.encode(make([['cat', 'sits']]), words, ['O'], 16)
  assert set(windows.examples.tokens) == {'input_ids', 'token_type_ids', 'attention_mask'}


def test_unknown_tags_stop_with_file_and_line(words):
  sentences = make([['cat'], ['sits', 'on']], [['O'], ['O', 'B-NEW']])
  with pytest.raises(TaggingError, match=r"made: line 4: tag 'B-NEW' is not among the labels"):
    tagging.encode(sentences, words, ['O', 'B-X'], 16, training=True)


def test_unknown_tags_of_dev_are_left_out_of_the_loss_and_said(words, caplog):
  sentences = make([['cat'], ['sits', 'on']], [['O'], ['O', 'B-NEW']])
  windows = tagging.encode(sentences, words, ['O', 'B-X'], 16)
  assert "line 4: tag 'B-NEW' is not among the labels" in caplog.text
  weights = [row.tolist() for row in windows.examples.tokens['label_weights']]
  assert [sum(row) for row in weights] == [1, 1]
  assert all((row >= 0).all() for row in windows.examples.tokens['labels'])


@pytest.mark.parametrize('max_length, stride', [(2, None), (0, None), (8, 7), (8, 0)])
def test_windows_that_cannot_be(words, max_length, stride):
  with pytest.raises(TaggingError, match='a window must hold'):
    tagging.encode(make([['cat']]), words, ['O'], max_length, stride)


WORD = st.one_of(
    st.sampled_from(
        ['cat', 'sits', 'thecat', 'zzz', 'a', '\u00ad', 'sings' * 9, 'slit', '中文', "it's"]),
    st.text(st.characters(codec='utf-8', exclude_characters='\0\t\n\r '), min_size=1, max_size=6))


@settings(deadline=None)
@given(st.lists(st.lists(WORD, min_size=1, max_size=20), min_size=1, max_size=3),
       st.integers(3, 24), st.data())
def test_every_word_counts_exactly_once(words, tokens, max_length, data):
  stride = data.draw(st.one_of(st.none(), st.integers(1, max_length - 2)))
  labels = [f'B-{n}' for n in range(60)]
  tags = [[f'B-{20 * n + i}' for i in range(len(row))] for n, row in enumerate(tokens)]
  windows = tagging.encode(make(tokens, tags), words, labels, max_length, stride)
  seen = collections.Counter(
      (int(sentence), int(word))
      for sentence, row in zip(windows.sentences, windows.words, strict=True) for word in row)
  assert seen == {(n, i): 1 for n, row in enumerate(tokens) for i in range(len(row))}
  assert windows.examples.lengths.max() <= max_length
  # A model that says what it is told, and only where it is asked, gives back all tags.
  length = int(windows.examples.lengths.max()) + 1
  outputs = np.zeros((len(windows), length, len(labels)), np.float32)
  for number, fields in enumerate(zip(*(windows.examples.tokens[f] for f in (
      'input_ids', 'labels', 'label_weights')), strict=True)):
    ids, told, weights = fields
    assert np.flatnonzero(weights).tolist() == windows.positions[number].tolist()
    where = np.flatnonzero(weights)
    outputs[number, where, told[where]] = 1
    for word, position in zip(windows.words[number], where, strict=True):
      pieces = words.encode(tokens[windows.sentences[number]][word]).ids or [words.unk_id]
      assert ids[position] == pieces[0]
      shown = ids[position:position + len(pieces)].tolist()
      assert shown == pieces or len(pieces) > max_length - 2  # words are whole in their window
  assert tagging.predictions(windows, outputs) == tags


# --- Prediction files --------------------------------------------------------------------------


def test_write_predictions(tmp_path):
  path = tmp_path / 'new' / 'test.conll'
  tokens, gold = [['EU', 'rejects'], ['lamb']], [['B-ORG', 'O'], ['O']]
  tagging.write_predictions(make(tokens, gold), [['O', 'O'], ['B-X']], path)
  assert path.read_text('utf-8') == 'EU\tB-ORG\tO\nrejects\tO\tO\n\nlamb\tO\tB-X\n\n'
  tagging.write_predictions(make(tokens), gold, path)
  assert path.read_text('utf-8') == 'EU\tB-ORG\nrejects\tO\n\nlamb\tO\n\n'
  assert len(list(path.parent.iterdir())) == 1
  with pytest.raises(ValueError):
    tagging.write_predictions(make(tokens), [['O', 'O']], path)
  assert path.read_text('utf-8').startswith('EU\tB-ORG\n')  # what was there is left whole


TOKEN = st.text(st.characters(codec='utf-8', exclude_characters='\0\t\n\ufeff'), min_size=1,
                max_size=6).filter(lambda text: text.strip(' ') == text)
TAGGED = st.lists(st.tuples(TOKEN, st.sampled_from(['O', 'B-X', 'I-X', 'B-Y'])), min_size=1,
                  max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(TAGGED, min_size=1, max_size=4))
def test_written_and_read_again(tmp_path, drawn):
  tokens, tags = ([[pair[i] for pair in row] for row in drawn] for i in (0, 1))
  for gold in (None, tags):
    tagging.write_predictions(make(tokens, gold), tags, tmp_path / 'out')
    again = tagging.read(tmp_path / 'out', scheme='bio')
    assert (again.tokens, again.tags) == (tokens, tags)


# --- Real files --------------------------------------------------------------------------------


@pytest.mark.parametrize('name, sentences, tokens', [
    ('wnut17train.conll', 3394, 62730), ('emerging.dev.conll', 1009, 15733),
    ('emerging.test.annotated', 1287, 23394)])
def test_real_wnut17(shared, words, name, sentences, tokens):
  read_file = tagging.read(shared / 'data' / 'ner' / 'wnut17' / name)
  assert len(read_file) == sentences
  assert sum(map(len, read_file.tokens)) == tokens
  assert (read_file.scheme, read_file.wrong_transitions) == ('bio', 0)
  labels = tagging.label_list(read_file)
  assert labels[:3] == ['O', 'B-corporation', 'B-creative-work']
  assert len(labels) == 13


def test_real_wnut17_in_windows(shared):
  folder = shared / 'data'
  sentences = tagging.read(folder / 'ner' / 'wnut17' / 'emerging.dev.conll')
  tok = tokenizer.load(folder / 'vocab' / 'bert-base-uncased-vocab.txt', lowercase=True)
  labels = tagging.label_list(sentences)
  for max_length in (128, 12):
    windows = tagging.encode(sentences, tok, labels, max_length)
    assert sum(weights.sum() for weights in windows.examples.tokens['label_weights']) == 15733
    length = int(windows.examples.lengths.max())
    outputs = np.zeros((len(windows), length, len(labels)), np.float32)
    for number, told in enumerate(windows.examples.tokens['labels']):
      outputs[number, np.arange(len(told)), told] = 1
    assert tagging.predictions(windows, outputs) == sentences.tags
