"""Tokens that Transformers added to a vocabulary: listed beside it, with ids that follow on it.

Transformers looks for them in text before it cuts words. Our tokenizers have no such step: here
they become entries like any other, so that the rows trained for them are kept.
"""

from collections.abc import Iterable
from typing import Any

from etils import epath

from bertjax.convert import config_file
from bertjax.convert.names import ConversionError
from bertjax.convert.parameters import some
from bertjax.data.tokenizer import CONFIG, FAST

# The files that list some, all of them or none, and how: pairs of text and id.
_FORMS = {
    'added_tokens.json': lambda values: values.items(),
    CONFIG: lambda values: [(entry['content'], int(index)) for index, entry in (
        values.get('added_tokens_decoder') or {}).items()],
    FAST: lambda values: [
        (entry['content'], entry['id']) for entry in values.get('added_tokens') or ()],
}
FILES = tuple(_FORMS)
_MEND = 'name a vocab.txt that has every token with --vocab'


def complete(entries: dict[int, str], origin: epath.Path, files: Iterable[epath.Path]) -> list[str]:
  """The entries of a vocabulary and the tokens added to it, by their ids.

  Args:
    entries: those of the vocabulary itself.
    origin: its file, for messages.
    files: where added tokens may be listed, by names among `FILES`.

  Raises:
    ConversionError: a damaged list, one that contradicts the vocabulary or another list, or ids
      that are not 0, 1, 2, ... altogether.
  """
  entries = dict(entries)
  ids = {token: index for index, token in entries.items()}
  before = set(ids)
  for file in files:
    for token, index in _listed(file):
      if entries.setdefault(index, token) != token or ids.setdefault(token, index) != index:
        raise ConversionError(f'{file}: the id {index} of the added token {token!r} contradicts '
                              f'{origin.name} or another list; {_MEND}')
  if sorted(entries) != list(range(len(entries))):
    more = [token for token in ids if token not in before]
    added = f', with the tokens added to it ({some(more)}),' if more else ''
    raise ConversionError(f'{origin}: its ids{added} are not 0 to {len(entries) - 1}, each once; '
                          f'{_MEND}')
  return [entries[index] for index in range(len(entries))]


def _listed(file: epath.Path) -> list[tuple[str, int]]:
  """The tokens that a file lists, with their ids; none where there is no file."""
  if not file.exists():
    return []
  values = config_file.read(file)
  try:
    return _pairs(_FORMS[file.name](values))
  except (AttributeError, KeyError, TypeError, ValueError):
    raise ConversionError(f'{file}: its list of added tokens is damaged; {_MEND}') from None


def _pairs(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[str, int]]:
  pairs = list(pairs)
  if not all(isinstance(token, str) and type(index) is int for token, index in pairs):
    raise TypeError('not a text and a number')
  return pairs
