"""The embedded default corpus: prose out of docstrings, nothing twice, in a fixed order."""

import itertools
import subprocess
import sys

import pytest

from bertjax.data import build, corpus, shards
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
