"""The tokenizer that belongs to a foreign checkpoint: its vocabulary, and its casing."""

import re
import tempfile
from typing import Any, NamedTuple

from etils import epath

from bertjax.convert import config_file
from bertjax.convert.names import ConversionError
from bertjax.data import tokenizer as tokenizer_lib
from bertjax.data.encoding import Tokenizer, TokenizerError

_FAST = 'tokenizer.json'  # the file of the `tokenizers` package: vocabulary and rules in one


class Found(NamedTuple):
  """A tokenizer, the bytes of its files as `save` writes them, and how its casing was found."""

  tokenizer: Tokenizer
  files: dict[str, bytes]
  casing: str


def find(folder: epath.Path, vocab: epath.PathLike | None, lowercase: bool | None) -> Found:
  """Loads the tokenizer of a checkpoint.

  Casing is what is asked for, else what tokenizer_config.json or tokenizer.json says, else what
  the folder's name says ('uncased' or 'cased', as Google's releases), else the tokenizer's default,
  which refuses a vocabulary with capitals.

  Args:
    folder: the folder of the weights.
    vocab: a vocabulary file or tokenizer folder to take instead of the one in `folder`.
    lowercase: whether text is lower-cased; None where nobody asks.

  Raises:
    ConversionError: there is no vocabulary, or tokenizer.json is of another kind.
    TokenizerError: a broken vocabulary, a contradiction, or capitals and no word on casing.
  """
  named = epath.Path(vocab).expanduser() if vocab else folder
  with tempfile.TemporaryDirectory() as scratch:
    fast = named / _FAST if named.is_dir() else named
    if any((named / name).exists() for name in tokenizer_lib.VOCABULARIES):
      path, switches = named, _normalizer(config_file.read(fast)) if fast.exists() else {}
    elif fast.name == _FAST and fast.exists():
      path, switches = _unpack(fast, epath.Path(scratch))
    elif named.is_dir():
      raise ConversionError(f'{named}: has no {" or ".join(tokenizer_lib.VOCABULARIES)} and no '
                            f'{_FAST}; give the vocabulary with --vocab FILE')
    else:
      path, switches = named, {}
    switches, casing = _casing(path, folder, switches, lowercase)
    try:
      tokenizer = tokenizer_lib.load(path, **switches)
    except TokenizerError as error:
      raise TokenizerError(str(error).replace(str(path / 'vocab.txt'), str(fast)) if
                           str(path) == scratch else str(error)) from None
    saved = epath.Path(scratch) / 'saved'
    tokenizer.save(saved)
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
  return Found(tokenizer, files, casing)


def _casing(path: epath.Path, folder: epath.Path, switches: dict[str, Any],
            lowercase: bool | None) -> tuple[dict[str, Any], str]:
  """The switches to load with, and in words where the casing comes from."""
  config = (path if path.is_dir() else path.parent) / tokenizer_lib.CONFIG
  stored = config_file.read(config) if config.exists() else {}
  # What tokenizer_config.json says counts, as in Transformers; `load` reads it by itself.
  if stored.get('do_lower_case') is not None:
    switches.pop('lowercase', None)
  if stored.get('strip_accents') is not None:
    switches.pop('strip_accents', None)
  if lowercase is not None:
    if switches.get('lowercase', lowercase) != lowercase:
      raise ConversionError(f'{folder / _FAST} says lowercase={switches["lowercase"]}, but '
                            f'{lowercase} is asked for; leave the switch out')
    return switches | {'lowercase': lowercase}, 'as asked'
  if stored.get('do_lower_case') is not None:
    return switches, f'as {tokenizer_lib.CONFIG} says'
  if 'lowercase' in switches:
    return switches, f'as {_FAST} says'
  named = re.search(r'(?i)(un)?cased', folder.absolute().name)
  if named:
    return switches | {'lowercase': bool(named.group(1))}, f'by the folder\'s name, {folder.name}'
  return switches, 'by default: nothing says otherwise'


def _normalizer(values: dict[str, Any]) -> dict[str, Any]:
  """Our switches from the normalizer of a tokenizer.json; those that are null are left out."""
  normalizer = values.get('normalizer') or {}
  if normalizer.get('type') != 'BertNormalizer':
    return {}
  theirs = {'lowercase': 'lowercase', 'strip_accents': 'strip_accents',
            'split_cjk': 'handle_chinese_chars', 'clean_text': 'clean_text'}
  return {ours: normalizer[name] for ours, name in theirs.items()
          if normalizer.get(name) is not None}


def _unpack(path: epath.Path, scratch: epath.Path) -> tuple[epath.Path, dict[str, Any]]:
  """Writes the vocabulary of a tokenizer.json as vocab.txt, with the config that lies beside it."""
  values = config_file.read(path)
  model = values.get('model')
  if not isinstance(model, dict) or not isinstance(model.get('vocab'), dict):
    raise ConversionError(f'{path}: holds no WordPiece vocabulary')
  if model.get('type', 'WordPiece') != 'WordPiece' or (
      model.get('continuing_subword_prefix', '##') != '##'):
    raise ConversionError(f'{path}: its model is {model.get("type")} with prefix '
                          f'{model.get("continuing_subword_prefix")!r}; bertjax reads WordPiece '
                          'with ##')
  added = {entry['content']: entry['id'] for entry in values.get('added_tokens') or ()}
  entries = {index: entry for entry, index in (added | model['vocab']).items()}
  if sorted(entries) != list(range(len(entries))) or any('\n' in entry for entry in
                                                         entries.values()):
    raise ConversionError(f'{path}: its ids are not 0 to {len(entries) - 1}, each once; give a '
                          'vocab.txt with --vocab')
  text = ''.join(f'{entries[index]}\n' for index in range(len(entries)))
  (scratch / 'vocab.txt').write_bytes(text.encode())
  beside = path.parent / tokenizer_lib.CONFIG
  if beside.exists():
    (scratch / tokenizer_lib.CONFIG).write_bytes(beside.read_bytes())
  switches = _normalizer(values)
  longest = model.get('max_input_chars_per_word')
  # 100 is what the package writes by default; Google's rule, and ours, is 200.
  return scratch, switches | ({'max_chars_per_word': longest} if longest not in (None, 100) else {})


def facts(found: Found) -> str:
  """The tokenizer in a line, for a report."""
  tokenizer = found.tokenizer
  case = 'lower-cased' if tokenizer.switches.get('lowercase') else 'cased'
  return f'{tokenizer.vocab_size:,} entries ({tokenizer.type}), {case} {found.casing}'
