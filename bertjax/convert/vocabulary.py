"""The tokenizer that belongs to a foreign checkpoint: its vocabulary, and its casing."""

import re
import tempfile
from typing import Any, NamedTuple

from etils import epath

from bertjax.convert import added_tokens, config_file
from bertjax.convert.names import ConversionError
from bertjax.convert.parameters import some
from bertjax.data import tokenizer as tokenizer_lib
from bertjax.data.encoding import Tokenizer, TokenizerError

_FAST = tokenizer_lib.FAST
_WORDS, _PIECES = tokenizer_lib.VOCABULARIES


class Found(NamedTuple):
  """A tokenizer that was found.

  Attributes:
    tokenizer: itself.
    files: the bytes of its files as `save` writes them.
    casing: how its casing was found, in words.
    added: the entries that were listed beside the vocabulary, as tokens added to it.
  """

  tokenizer: Tokenizer
  files: dict[str, bytes]
  casing: str
  added: list[str]


class _Place(NamedTuple):
  """What to load: a file, what the user knows it as, switches beside it, and tokens added to it."""

  path: epath.Path
  origin: epath.Path
  switches: dict[str, Any]
  added: list[str]


def find(folder: epath.Path, vocab: epath.PathLike | None, lowercase: bool | None) -> Found:
  """Loads the tokenizer of a checkpoint.

  Casing is what is asked for, else what tokenizer_config.json or tokenizer.json says, else what
  the folder's name says ('uncased' or 'cased', as Google's releases), else the tokenizer's default,
  which refuses a vocabulary with capitals. Tokens that Transformers added to a vocabulary become
  its last entries, unless a vocab.txt is named itself.

  Args:
    folder: the folder of the weights.
    vocab: a vocabulary file or tokenizer folder to take instead of the one in `folder`.
    lowercase: whether text is lower-cased; None where nobody asks.

  Raises:
    ConversionError: there is no vocabulary, tokenizer.json is of another kind, or added tokens
      cannot be entries of the vocabulary.
    TokenizerError: a broken vocabulary, rules that are not ours, a contradiction, or capitals and
      no word on casing.
  """
  named = epath.Path(vocab).expanduser() if vocab else folder
  tokenizer_lib.check_rules(named)  # here, as `load` is given a file, which says that all is well
  with tempfile.TemporaryDirectory() as scratch:
    path, origin, switches, added = _place(named, epath.Path(scratch))
    switches, casing = _casing(path, folder, switches, lowercase)
    try:
      tokenizer = tokenizer_lib.load(path, **switches)
    except TokenizerError as error:
      said = str(error).replace(str(path), str(origin)).replace(scratch, str(origin.parent))
      raise TokenizerError(said) from None
    if path.name == _PIECES and named.is_dir():
      _check_pieces(tokenizer, named)
    saved = epath.Path(scratch) / 'saved'
    tokenizer.save(saved)
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
  return Found(tokenizer, files, casing, added)


def _place(named: epath.Path, scratch: epath.Path) -> _Place:
  """The vocabulary of a folder or file; written to `scratch` where no file holds it as it is."""
  plain = [named / name for name in tokenizer_lib.VOCABULARIES if (named / name).exists()]
  fast = named / _FAST if named.is_dir() else named
  values = config_file.read(fast) if fast.name == _FAST and fast.exists() else None
  if not plain and values is None:
    if named.is_dir():
      raise ConversionError(f'{named}: has no {" or ".join(tokenizer_lib.VOCABULARIES)} and no '
                            f'{_FAST}; give the vocabulary with --vocab FILE')
    return _Place(named, named, {}, [])
  if plain and plain[-1].name == _PIECES:
    return _Place(plain[0] if len(plain) == 1 else named, plain[0], {}, [])
  switches = _normalizer(values or {})
  origin = plain[0] if plain else fast
  if plain:
    entries = dict(enumerate(_lines(origin)))
  else:
    entries, longest = _entries(values, fast), values['model'].get('max_input_chars_per_word')
    # 100 is what the package writes by default; Google's rule, and ours, is 200.
    switches |= {'max_chars_per_word': longest} if longest not in (None, 100) else {}
  whole = added_tokens.complete(entries, origin, _lists(named))
  known = set(entries.values())
  added = [token for token in whole if token not in known]
  if plain and not added:
    return _Place(origin, origin, switches, [])
  (scratch / _WORDS).write_bytes(_text(whole, origin))
  beside = origin.parent / tokenizer_lib.CONFIG
  if beside.exists():
    (scratch / tokenizer_lib.CONFIG).write_bytes(beside.read_bytes())
  return _Place(scratch / _WORDS, origin, switches, added)


def _lists(named: epath.Path) -> list[epath.Path]:
  """Where tokens are listed that were added to the vocabulary: a file that is named says it all."""
  return [named / name for name in added_tokens.FILES] if named.is_dir() else [named]


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
  normalizer = values.get('normalizer') or {}  # BERT's, as `check_rules` has seen
  theirs = {'lowercase': 'lowercase', 'strip_accents': 'strip_accents',
            'split_cjk': 'handle_chinese_chars', 'clean_text': 'clean_text'}
  return {ours: normalizer[name] for ours, name in theirs.items()
          if normalizer.get(name) is not None}


def _entries(values: dict[str, Any], path: epath.Path) -> dict[int, str]:
  """The vocabulary of a tokenizer.json by ids, without tokens added to it."""
  model = values.get('model')
  vocab = model.get('vocab') if isinstance(model, dict) else None
  if not isinstance(vocab, dict) or not all(type(index) is int for index in vocab.values()):
    raise ConversionError(f'{path}: holds no WordPiece vocabulary')
  if model.get('continuing_subword_prefix', '##') != '##':
    raise ConversionError(f'{path}: its continuations begin with '
                          f'{model["continuing_subword_prefix"]!r}; bertjax reads those with ##')
  entries = {index: entry for entry, index in vocab.items()}
  if len(entries) < len(vocab):
    raise ConversionError(f'{path}: has an id twice; give a vocab.txt with --vocab')
  return entries


def _lines(path: epath.Path) -> list[str]:
  """The entries of a vocab.txt; what is wrong with it is said when it is loaded."""
  text = path.read_bytes().decode('utf-8-sig', 'surrogateescape')
  return [line.removesuffix('\r') for line in text.removesuffix('\n').split('\n')]


def _text(entries: list[str], origin: epath.Path) -> bytes:
  """Entries as lines of a vocab.txt."""
  try:
    if any('\n' in entry or entry.endswith('\r') for entry in entries):
      raise ValueError('it has a line break')
    return ''.join(f'{entry}\n' for entry in entries).encode('utf-8', 'surrogateescape')
  except ValueError as error:  # UnicodeEncodeError is one
    raise ConversionError(f'{origin}: an entry cannot be a line of a vocab.txt ({error}); give a '
                          'vocab.txt with --vocab') from None


def _check_pieces(tokenizer: Tokenizer, folder: epath.Path):
  """Refuses tokens that were added to a SentencePiece model, which cannot be extended."""
  pieces = dict(enumerate(map(tokenizer.token, range(tokenizer.vocab_size))))
  added = added_tokens.complete(pieces, folder / _PIECES, _lists(folder))[len(pieces):]
  if added:
    raise ConversionError(
        f'{folder}: tokens were added to {_PIECES} ({some(added)}), which bertjax cannot do; to '
        f'leave them and their rows out, name the file itself: --vocab {folder / _PIECES}')


def facts(found: Found) -> str:
  """The tokenizer in a line, for a report."""
  tokenizer = found.tokenizer
  case = 'lower-cased' if tokenizer.switches.get('lowercase') else 'cased'
  return f'{tokenizer.vocab_size:,} entries ({tokenizer.type}), {case} {found.casing}'


def added_facts(found: Found) -> str:
  """What became of tokens that were added to the vocabulary, for a report."""
  tokenizer = found.tokenizer
  special = {*tokenizer.special_ids, tokenizer.unk_id}
  cut = [token for token in found.added if tokenizer.token_id(token) not in special
         and tokenizer.encode(token).ids != [tokenizer.token_id(token)]]
  never = f', which it never does with {some(cut, 100)}' if cut else ''
  return (f'{len(found.added)} tokens that were listed beside the vocabulary are entries of it, '
          f'with their rows: {some(found.added, 100)}. Transformers looks for them before it cuts '
          f'words; here text gives them only where our word splitting leaves them whole{never}')
