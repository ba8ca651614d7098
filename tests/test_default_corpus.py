"""The embedded default corpus: prose out of docstrings, nothing twice, in a fixed order."""

import ast
import itertools
import subprocess
import sys

import pytest
from etils import epath

from bertjax.data import build, corpus, prepare, shards
from bertjax.data import default_corpus as dc

DOCSTRING = '''Return the mean of the array along the given axis.

The average is taken over the flattened array by default, otherwise over
the specified axis.  See :func:`~numpy.mean` or `numpy.median` for more.

Parameters
----------
a : array_like
    Array containing numbers whose mean is desired.  If `a` is not an
    array, a conversion is attempted.
axis : None or int or tuple of ints, optional
    Axis or axes along which the means are computed.

.. versionadded:: 1.7.0
   A tuple of axes can be given since this version.

.. code-block:: python

   x = mean(This is code and not a sentence of English.)

Args:
  name: A string that names the operation in the graph.
  other: Another one of those arguments.

Notes
-----
The *arithmetic mean* is the sum of the elements divided by their number::

    mean = sum(Everything here is code.) / number_of_them()

Examples
--------
>>> a = np.array([[1, 2], [3, 4]])
>>> np.mean(a)
This output of a doctest looks like a sentence.

```python
print("Fenced code is not a sentence of English either.")
```
'''


def test_prose_is_what_is_left_of_a_docstring():
  assert dc.prose_of(DOCSTRING) == [
      'Return the mean of the array along the given axis.',
      'The average is taken over the flattened array by default, otherwise over the specified '
      'axis.',
      'See numpy.mean or numpy.median for more.',
      'Array containing numbers whose mean is desired.',
      'If a is not an array, a conversion is attempted.',
      'Axis or axes along which the means are computed.',
      'A tuple of axes can be given since this version.',
      'A string that names the operation in the graph.',
      'Another one of those arguments.',
      'The arithmetic mean is the sum of the elements divided by their number:',
  ]


SOURCE = '''# A comment with "quotes" and a \'\'\' in it.
"""The docstring of the module, which is long enough to be worth keeping.

It goes on for a second paragraph."""

TEXT = """A long string that is no docstring, because it is the value of a name, %s."""


class Lamp:  # A comment after the colon.
  r"""The docstring of the class has \\escapes that are kept, and goes on for a while yet."""

  def light(self, oil: "Oil" = 'whale: #1') -> 'Lamp':
    \'\'\'The docstring of a method in the other quotes, with an escape: \\u2028
    (it\\'s one) and a second line.\'\'\'
    print("""Not a docstring either, however long this text may be: it is an argument.""")
    """Not a docstring, because it does not follow the head of the function it is in."""
    def inner():
      """Short."""
'''


def test_docstrings_are_those_that_ast_finds(tmp_path):
  path = tmp_path / 'lamp.py'
  path.write_text(SOURCE, encoding='utf-8')
  tree = ast.parse(SOURCE)
  inner = (ast.Module, ast.ClassDef, ast.FunctionDef)
  wanted = [ast.get_docstring(n, clean=False) for n in ast.walk(tree) if isinstance(n, inner)]
  assert list(dc._docstrings(path)) == [text for text in wanted if text and len(text) > 80]
  assert len(list(dc._docstrings(path))) == 3


@pytest.mark.parametrize('content', [
    b'', b'"""', b'x = """never closed ' + b'a' * 10**6, b'"' * 10**5, b'\'"' * 10**5,
    b'"""' + b'\\' * 99_999, b'"""\xff"""',
    b'"""\\N{no such name} ' + b'a ' * 50 + b'"""',
])
def test_files_that_are_no_python_do_no_harm(tmp_path, content):
  path = tmp_path / 'a.py'
  path.write_bytes(content)
  assert not list(dc._docstrings(path))


def test_the_text_is_made_once_for_tokenizer_and_shards(monkeypatch, tmp_path):
  made = []
  raw = dc._raw_documents
  monkeypatch.setattr(dc, 'PACKAGES', (('absl', ('absl-py',)),))
  monkeypatch.setattr(dc, '_raw_documents', lambda packages: made.append(packages) or raw(packages))
  dc._documents.cache_clear()
  prepare.build_from_text(
      epath.Path(tmp_path), inputs='builtin:docs', format='auto', language='en',
      tokenizer_type='wordpiece', vocab_size=500, heldout=0.01, num_workers=2)
  assert made == [('absl',)]


@pytest.fixture(scope='module')
def small():
  return dc.documents(('absl', 'ml_collections'))


def test_documents_have_two_or_more_sentences_and_none_twice(small):
  assert len(small) > 100
  assert all(len(document) >= 2 for document in small)
  sentences = [sentence.lower() for document in small for sentence in document]
  assert len(sentences) == len(set(sentences))
  text = '\n'.join(sentences)
  assert '>>>' not in text and '```' not in text and ':func:' not in text
  letters = sum(char.isalpha() or char == ' ' for char in text)
  assert letters > 0.9 * len(text)


def test_near_duplicates_are_dropped():
  raw = [['One.', 'Two.', 'Three.'], ['One.', 'Two.', 'Four.', 'Five.', 'Six.'],
         ['One.', 'Two.', 'Three.', 'Seven.', 'Eight.'], ['Nine.', 'nine.'],
         ['Ten.', 'One.', 'El.']]
  assert list(dc._without_repeats(raw)) == [
      ['One.', 'Two.', 'Three.'], ['Four.', 'Five.', 'Six.'], ['Ten.', 'El.']
  ]


def test_the_order_is_the_same_in_another_process(small):
  code = (
      "from bertjax.data import default_corpus as d; "
      "print(d.corpus_hash(d.documents(('absl', 'ml_collections'))))"
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                        encoding='utf-8')
  assert done.stdout.strip() == dc.corpus_hash(small)


def test_packages_are_not_imported():
  code = (
      "import sys; from bertjax.data import default_corpus as d; d.documents(('optax',)); "
      "sys.exit('optax' in sys.modules)"
  )
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_a_package_that_is_not_installed_is_left_out(small):
  topics = dc.documents(())
  assert dc.documents(('no_such_package_here',)) == topics
  assert list(itertools.islice(small, len(topics))) == list(topics)


def test_fingerprint_names_every_version():
  found = dc.fingerprint()
  assert any(version.startswith('python 3.') for version in found)
  assert any(version.startswith('numpy 2.') for version in found)


def test_builtin_docs_is_an_input_of_build_and_of_training(tmp_path, small, monkeypatch):
  monkeypatch.setattr(dc, 'documents', lambda packages=None: small)
  texts = list(corpus.iter_text(['builtin:docs']))
  assert texts == [sentence for document in small for sentence in document]
  vocabulary = tmp_path / 'vocab.txt'
  entries = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
  entries += [chr(c) for c in range(33, 127) if not chr(c).isupper()]
  entries += [f'##{chr(c)}' for c in range(97, 123)]
  vocabulary.write_text('\n'.join(entries) + '\n', encoding='utf-8')
  manifest = build.build(build.BuildSettings(
      inputs=('builtin:docs',), tokenizer=str(vocabulary), output=str(tmp_path / 'out'),
      lowercase=True))
  kept = sum(split.num_documents for split in manifest.splits.values())
  assert kept + manifest.duplicates_dropped == len(small)
  assert manifest.corpus['formats'] == ['builtin']
  assert shards.open_split(tmp_path / 'out', 'heldout').num_documents > 0
