"""Readers: every format, hostile bytes, and pieces that add up to the whole."""

import gzip
import json

import numpy as np
import pytest
import sentencex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bertjax.data import corpus, prose


def read(path, unit_bytes=corpus.UNIT_BYTES, stats=None, **options):
  """Documents of an input, read piece by piece: a list of lists of sentences."""
  read_settings = corpus.ReadSettings(**options)
  sources = [corpus.inspect(name, read_settings) for name in corpus.expand([str(path)])]
  documents = []
  for unit in corpus.plan_pieces(sources, read_settings, unit_bytes):
    for piece in unit:
      document = []
      for block in corpus.read_piece(piece, read_settings, stats):
        start = 0
        for end in [*block.document_ends.tolist(), len(block.sentences)]:
          document += block.sentences[start:end]
          start = end
          if end in block.document_ends and document:
            documents.append(document)
            document = []
      if document:
        documents.append(document)
  return documents


def write(path, text):
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


# --- One sentence a line ---------------------------------------------------------------------


def test_b008_blank_lines_and_crlf(bugs, tmp_path):
  path = bugs / 'corpus_dirty.txt'
  documents = read(path)
  assert [len(document) for document in documents] == [2, 3, 1]
  assert documents[0][0].startswith('The')  # no byte order mark
  assert not any('\r' in sentence for document in documents for sentence in document)


def test_b008_white_space_lines_of_any_kind_end_a_document(tmp_path):
  text = '\ufeffOne.\r\nTwo.\r\n \t \r\nThree.\n\u3000\u00a0\nFour.\n\n\n\nFive'
  documents = [['One.', 'Two.'], ['Three.'], ['Four.'], ['Five']]
  assert read(write(tmp_path / 'a.txt', text), format='sentences') == documents


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('corpus_onedoc.txt', [6]),
        ('corpus_onesent_docs.txt', [1] * 6),
        ('corpus_double_spaced.txt', [1] * 8),
        ('corpus_pairs.txt', [2] * 5),
        ('corpus_longline.txt', [4, 2]),
    ],
)
def test_bug_corpora_have_the_documents_expected(bugs, name, expected):
  assert [len(document) for document in read(bugs / name)] == expected


LETTERS = st.characters(codec='utf-8', exclude_categories=('Cc', 'Zs', 'Zl', 'Zp'))
WORD = st.text(LETTERS, min_size=1)
DOCUMENTS = st.lists(st.lists(WORD.filter(str.strip), min_size=1, max_size=5), max_size=30)


@given(documents=DOCUMENTS, unit_bytes=st.integers(1, 200), ends=st.sampled_from(['\n', '\r\n']))
@example(documents=[['a'], ['b']], unit_bytes=1, ends='\n')
@settings(max_examples=100, deadline=None)
def test_pieces_of_any_size_add_up_to_the_whole(tmp_path_factory, documents, unit_bytes, ends):
  documents = [[sentence.strip() for sentence in document] for document in documents]
  text = (ends * 2).join(ends.join(document) for document in documents)
  path = write(tmp_path_factory.mktemp('corpus') / 'a.txt', text)
  whole = [[s.removeprefix('\ufeff') for s in d] for d in documents[:1]] + documents[1:]
  whole = [[s for s in d if s] for d in whole]
  assert read(path, unit_bytes, format='sentences') == [d for d in whole if d]


def test_pieces_cover_each_byte_once_and_blocks_are_cut_at_lines(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus, '_BLOCK_BYTES', 7)
  lines = [f'Sentence number {n}.' for n in range(100)]
  path = write(tmp_path / 'a.txt', '\n'.join(lines[:50]) + '\n\n' + '\n'.join(lines[50:]))
  source = corpus.inspect(str(path), corpus.ReadSettings('sentences'))
  pieces = [p for unit in corpus.plan_pieces([source], corpus.ReadSettings(), 300) for p in unit]
  assert [p.start for p in pieces] + [source.size] == [0] + [p.end for p in pieces]
  assert len(pieces) == 2  # a document is never cut
  assert read(path, 300) == [lines[:50], lines[50:]]


def test_small_files_share_a_unit(tmp_path):
  for number in range(10):
    write(tmp_path / f'{number}.txt', 'A sentence.\n' * 10)
  sources = [corpus.inspect(n, corpus.ReadSettings()) for n in corpus.expand([str(tmp_path)])]
  units = corpus.plan_pieces(sources, corpus.ReadSettings(), 600)
  assert [len(unit) for unit in units] == [5, 5]


def test_one_very_long_line_is_read(tmp_path):
  path = write(tmp_path / 'a.txt', 'word ' * 600_000 + '\nNext.\n')
  assert [len(s) for s in read(path, format='sentences')[0]] == [2_999_999, 5]


# --- Encodings -------------------------------------------------------------------------------


def test_b005_strict_names_file_line_and_byte(bugs):
  path = bugs / 'corpus_badutf8.txt'
  where = r'corpus_badutf8.txt, line 2, byte offset 58: .*0xe9'
  with pytest.raises(corpus.CorpusError, match=where):
    read(path)


@pytest.mark.parametrize('policy', ['replace', 'ignore'])
def test_b005_lenient_keeps_sentences_and_counts_lines(bugs, policy):
  stats = corpus.ReadStats()
  documents = read(bugs / 'corpus_badutf8.txt', stats=stats, encoding_errors=policy)
  assert [len(document) for document in documents] == [3, 3]
  assert stats.bad_lines == 3
  text = '\n'.join(sentence for document in documents for sentence in document)
  assert ('\ufffd' in text) == (policy == 'replace')
  assert 'Le gardien a pr' in text and 'ends here.' in text


def test_b005_offsets_count_from_the_start_of_the_file_in_any_piece(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus, '_BLOCK_BYTES', 64)
  text = b'\xef\xbb\xbf' + b'Good line.\n\n' * 40 + b'Bad \xff line.\n'
  where = f'line 81, byte offset {text.index(bytes([0xFF]))}:'
  for name, content in (('a.txt', text), ('b.txt.gz', gzip.compress(text))):
    write(tmp_path / name, content)
    with pytest.raises(corpus.CorpusError, match=where):
      read(tmp_path / name, 100, format='sentences')


def test_utf16_is_recognised_in_the_message(tmp_path):
  with pytest.raises(corpus.CorpusError, match='UTF-16'):
    read(write(tmp_path / 'a.txt', 'Text.\n'.encode('utf-16')), format='sentences')


def test_a_damaged_gzip_file_is_named(tmp_path):
  whole = gzip.compress(np.random.default_rng(0).bytes(100_000).hex().encode())
  for number, content in enumerate((whole[: len(whole) // 2], b'no gzip at all')):
    path = write(tmp_path / f'{number}.txt.gz', content)
    with pytest.raises(corpus.CorpusError, match=f'{number}.txt.gz is not a whole gzip file'):
      read(path, format='sentences')


# --- Prose -----------------------------------------------------------------------------------

BOOK = """# A Book
## By Nobody

## Chapter 1

It was night. Mr. Smith slept. "Who is there?" he asked. Nobody was there at all, and he slept on.
-------
The next paragraph has one sentence.

## Chapter 2

The end came soon. It was good.
"""


def test_headings_open_documents(tmp_path):
  documents = read(write(tmp_path / 'book.md', BOOK))
  assert [document[0] for document in documents] == ['A Book', 'Chapter 2']
  assert documents[0][:3] == ['A Book', 'By Nobody', 'Chapter 1']
  assert documents[0][-1] == 'The next paragraph has one sentence.'
  assert 'Mr. Smith slept.' in documents[0]
  assert documents[1] == ['Chapter 2', 'The end came soon.', 'It was good.']


def test_wikitext_and_chinese_chapters_open_documents(tmp_path):
  wiki = ' \n = One = \n \n First one . Next . \n = = Part = = \n More . \n = Two = \n Last . \n'
  assert [d[0] for d in read(write(tmp_path / 'w', wiki), format='prose')] == ['One', 'Two']
  text = '第一回 甲乙\n\n今天很好。明天呢？\n第二回 丙丁\n走了！\n'
  documents = read(write(tmp_path / 'z', text), format='prose', language='zh')
  assert documents == [['第一回 甲乙', '今天很好。', '明天呢？'], ['第二回 丙丁', '走了！']]


def test_hard_wrapped_lines_are_joined(tmp_path):
  text = """This is text that somebody has typed with lines of about seventy or so
characters each. It goes on over the line ends, as was the custom for a
very long time in electronic mail and in Project Gutenberg. Every line
break in it stands for a space, apart from those at empty lines.

Here is another paragraph of the very same kind. It must be kept apart
from the one before.
"""
  documents = read(write(tmp_path / 'a.txt', text))
  assert documents == [[
      'This is text that somebody has typed with lines of about seventy or so characters each.',
      'It goes on over the line ends, as was the custom for a very long time in electronic mail '
      'and in Project Gutenberg.',
      'Every line break in it stands for a space, apart from those at empty lines.',
      'Here is another paragraph of the very same kind.',
      'It must be kept apart from the one before.',
  ]]
  chinese = prose.sentences_of(['今天天气', '很好。走吧。'], 'zh', wrapped=True)
  assert chinese == ['今天天气很好。', '走吧。']


def test_long_prose_without_headings_becomes_documents_at_paragraphs(tmp_path):
  paragraph = 'Some words make a sentence here. And some more make another. ' * 20
  path = write(tmp_path / 'a.txt', (paragraph.strip() + '\n') * 300)
  documents = read(path)
  assert len(documents) == 4
  assert all(len(document) % 40 == 0 for document in documents)
  pieces = read(path, 200_000)
  assert sum(pieces, []) == sum(documents, [])


@pytest.mark.parametrize('language', ['en', 'zh'])
def test_long_paragraphs_are_split_like_short_ones(language):
  sentence = {'en': 'He went to the town. ', 'zh': '今天的天气很好，我们走吧。'}[language]
  found = prose.split_sentences(sentence * 2000, language)
  assert found == [sentence.strip()] * 2000
  assert prose.split_sentences('x' * 100_000, language) == ['x' * 100_000]


def test_unclosed_quotes_do_not_take_quadratic_time():
  assert len(prose.split_sentences('“你好。' * 30_000, 'zh')) > 1  # minutes without the windows


@given(st.text(max_size=300), st.sampled_from(['en', 'zh', 'de', 'xx']))
@settings(deadline=None)
def test_sentencex_loses_no_text(text, language):
  """What the windows over long paragraphs rely on."""
  assert ''.join(sentencex.segment(language, text)) == text


def test_chinese_sentences_end_at_their_own_marks():
  text = '今天天气很好。我们去公园吧！好吗？他说：“好。”'
  assert prose.split_sentences(text, 'zh') == [
      '今天天气很好。', '我们去公园吧！', '好吗？', '他说：“好。”'
  ]


# --- JSON lines and tensorflow-datasets ------------------------------------------------------


def test_json_lines(tmp_path):
  rows = [{'text': 'One here. Two here.\n\nThree.', 'id': 1}, {'text': ''}, {'text': 'Ünder.'}]
  text = '\n'.join(json.dumps(row) for row in rows) + '\n\n'
  expected = [['One here.', 'Two here.', 'Three.'], ['Ünder.']]
  assert read(write(tmp_path / 'a.jsonl', text)) == expected
  assert read(write(tmp_path / 'unnamed', text), unit_bytes=5) == expected
  assert read(write(tmp_path / 'a.jsonl.gz', gzip.compress(text.encode()))) == expected


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('{"body": "x"}', "line 2: no text under the key 'text'.*'body'.*--text_field"),
        ('{"text": 3}', 'line 2: no text'),
        ('{"text": "x"', 'line 2: not JSON'),
        ('[1]', 'line 2: no text'),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, message):
  with pytest.raises(corpus.CorpusError, match='a.jsonl, ' + message):
    read(write(tmp_path / 'a.jsonl', '{"text": "A."}\n' + line + '\n'))


LONE = '{"text": "One is \\ud800 here. Two."}\n{"text": "\\ud83d\\ude00 Three \\udc00\\udc00."}\n'


def test_half_a_surrogate_pair_in_json_is_named(tmp_path):
  path = write(tmp_path / 'a.jsonl', '{"text": "Good."}\n' + LONE)
  where = r'a.jsonl, line 2: \\ud800 is half of a surrogate pair.*--encoding_errors replace'
  with pytest.raises(corpus.CorpusError, match=where):
    read(path)


@pytest.mark.parametrize(('policy', 'mark'), [('replace', '\ufffd'), ('ignore', '')])
def test_half_a_surrogate_pair_in_json_is_treated_as_a_bad_byte(tmp_path, policy, mark):
  stats = corpus.ReadStats()
  documents = read(write(tmp_path / 'a.jsonl', LONE), stats=stats, encoding_errors=policy)
  assert documents == [[f'One is {mark} here.', 'Two.'], [f'\U0001f600 Three {mark}{mark}.']]
  assert stats.bad_lines == 2


def test_text_field_is_chosen(tmp_path):
  path = write(tmp_path / 'a.jsonl', '{"body": "One is. Two is."}\n')
  assert read(path, text_field='body') == [['One is.', 'Two is.']]


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')  # tensorflow-datasets' own
def test_tfds(tmp_path, monkeypatch):
  """A data set of 100 examples is prepared here and read without network."""
  pytest.importorskip('importlib_resources')  # used and not declared by tensorflow-datasets
  import tensorflow_datasets as tfds

  def examples(count):
    for number in range(count):
      yield number, {'text': f'Text {number} is here. It ends.', 'id': number}

  builder = tfds.dataset_builders.store_as_tfds_dataset(
      'tiny_books',
      version='1.0.0',
      data_dir=tmp_path,
      features=tfds.features.FeaturesDict({'text': tfds.features.Text(), 'id': np.int32}),
      split_datasets={'train': list(examples(100)), 'test': list(examples(2))},
  )
  monkeypatch.setattr(tfds, 'builder', lambda name: builder)
  documents = read('tfds:tiny_books:train:text')
  assert len(documents) == 100 and documents[0][1] == 'It ends.'
  assert read('tfds:tiny_books') == documents
  assert read('tfds:tiny_books', unit_bytes=1000) == documents  # the same in several parts
  assert len(read('tfds:tiny_books:train[:10%]')) == 10
  assert len(read('tfds:tiny_books:1.0.0:test')) == 2
  with pytest.raises(corpus.CorpusError, match="no split 'valid'; there are: .*test"):
    read('tfds:tiny_books:valid')
  with pytest.raises(corpus.CorpusError, match="no field 'body'; there are: id, text"):
    read('tfds:tiny_books:train:body')


# --- Inputs ----------------------------------------------------------------------------------


def test_inputs_are_expanded_in_order_and_once(tmp_path):
  for name in ('b.txt', 'a.txt', 'sub/c.txt', '.hidden'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write(tmp_path / name, 'A.\n')
  names = corpus.expand([str(tmp_path / 'b.txt'), str(tmp_path / '*.txt'), str(tmp_path)])
  assert [name[len(str(tmp_path)) + 1 :] for name in names] == ['b.txt', 'a.txt', 'sub/c.txt']
  assert corpus.expand([str(tmp_path / '**' / 'c.txt')]) == [str(tmp_path / 'sub' / 'c.txt')]


def test_inputs_that_do_not_exist_are_named(tmp_path):
  with pytest.raises(corpus.CorpusError, match=r"no file matches --input '.*nothing\*'"):
    corpus.expand([str(tmp_path / 'nothing*')])
  with pytest.raises(corpus.CorpusError, match='tfds:NAME'):
    corpus.inspect('tfds::', corpus.ReadSettings())
  with pytest.raises(corpus.CorpusError, match='none of auto, sentences'):
    corpus.ReadSettings(format='xml')
  with pytest.raises(corpus.CorpusError, match="'bogus' is none of strict, replace, ignore"):
    corpus.ReadSettings(encoding_errors='bogus')


def test_a_language_is_a_code():
  for language in ('en', 'zh', 'deu', 'be-tarask'):
    corpus.ReadSettings(language=language)
  for language in ('English', 'EN', '', 'en '):
    with pytest.raises(corpus.CorpusError, match=f"language '{language}' is not a code"):
      corpus.ReadSettings(language=language)


def test_iter_text_gives_sentences_in_order_and_refuses_nothing(tmp_path):
  write(tmp_path / 'a.txt', 'One.\nTwo.\n\nThree.\n')
  write(tmp_path / 'b.jsonl', '{"text": "Four is. Five is."}\n')
  found = list(corpus.iter_text([str(tmp_path / '*')]))
  assert found == ['One.', 'Two.', 'Three.', 'Four is.', 'Five is.']
  (tmp_path / 'empty').write_bytes(b'\n \n')
  with pytest.raises(corpus.CorpusError, match='no text'):
    list(corpus.iter_text([str(tmp_path / 'empty')]))


def test_real_books_and_chinese_novels(shared):
  books = shared / 'data' / 'corpus_en' / 'books'
  emma = read(books / 'Jane_Austen__Emma.md')
  assert 54 <= len(emma) <= 56
  assert all('\r' not in sentence for document in emma for sentence in document)
  dream = read(shared / 'data' / 'corpus_zh' / 'hongloumeng.txt', language='zh')
  assert 121 <= len(dream) <= 124
  assert [len(d) for d in read(shared / 'data' / 'corpus_zh' / 'news_zh_1.txt')][:1] > [1]
  wiki = read(shared / 'data' / 'corpus_en' / 'wikitext-2' / 'wiki.valid.tokens')
  assert 60 <= len(wiki) <= 62
