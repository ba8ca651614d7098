"""The embedded default corpus: English that every environment of bertjax already holds.

It is read at run time from the pages of `pydoc_data.topics` (the reference behind Python's help())
and from the docstrings of the project's own dependencies, found in their source files without
importing them. Nothing of it is copied into the repository. A document is one topic page or one
docstring of two or more sentences. Code, doctests, tables and reStructuredText markup are taken
out, what remains is kept if it reads as a sentence.

The packages repeat each other (jax.numpy documents numpy's functions with numpy's words), so no
sentence is kept twice and a document most of whose sentences are known is dropped: held-out
documents would otherwise be half known from training.

The text, and with it `corpus_hash`, depends on the installed versions; both are logged.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from absl import logging

from bertjax.data import prose

# (module, distribution), the ones with most original prose first: of repeated text the first
# occurrence stays. tensorflow is installed as tensorflow-cpu on x86-64.
PACKAGES = (
    ('numpy', ('numpy',)),
    ('scipy', ('scipy',)),
    ('matplotlib', ('matplotlib',)),
    ('jax', ('jax',)),
    ('flax', ('flax',)),
    ('optax', ('optax',)),
    ('orbax', ('orbax-checkpoint',)),
    ('keras', ('keras',)),
    ('tensorflow', ('tensorflow-cpu', 'tensorflow')),
    ('tensorflow_datasets', ('tensorflow-datasets',)),
    ('absl', ('absl-py',)),
    ('etils', ('etils',)),
    ('ml_collections', ('ml-collections',)),
)
TOPICS = 'pydoc_data.topics'
_RULES = 2  # Raised when the text that is taken from a given source changes.
_SKIPPED_FOLDERS = {'test', 'tests', 'testing', '_test'}

# Comments and literals: only outside of them does a quote begin one.
_LITERAL = re.compile(
    r'''
    \#[^\n]*
    | """ (?P<double> (?: [^"\\]++ | \\. | "(?!"") )*+ ) """
    | \'{3} (?P<single> (?: [^'\\]++ | \\. | '(?!'') )*+ ) \'{3}
    | " (?: [^"\\\n] | \\. )*+ "
    | ' (?: [^'\\\n] | \\. )*+ '
    ''',
    re.VERBOSE | re.DOTALL,
)
_ALONE = re.compile(r'(?:^|\n)[ \t]*(?:(?P<raw>[rR])|[uU]?)$')

_INLINE = (
    (re.compile(r':[a-z:+-]+:`([^`<]*?)\s*(?:<[^`>]*>)?`'), r'\1'),  # :func:`name <target>`
    (re.compile(r'`+([^`]*)`+_{0,2}'), r'\1'),
    (re.compile(r'\*{1,2}(\S(?:[^*\n]*\S)?)\*{1,2}'), r'\1'),
    (re.compile(r'\|(\w+)\|'), r'\1'),
    (re.compile(r'\[(\d+|[^\]\[]+)\](?:_|\([^)]*\))'), r'\1'),  # citations and Markdown links
    (re.compile(r'(?<!\w)~(?=\w)'), ''),
)
_MARKED = re.compile(r'[`*|\]~]')
_PROSE_DIRECTIVE = re.compile(
    r'\.\. (?:note|warning|tip|important|caution|deprecated|versionadded|versionchanged)::'
)
_SECTION = re.compile(r'[A-Z][\w ]{2,24}:$|@\w+')  # 'Args:', 'Returns:', '@param'
_TYPED = re.compile(r'[\w*, .]+ : ')  # NumPy's 'name : type'
_UNDERLINE = re.compile(r'([=~^"*#+-])\1{2,}')
_ENTRY = re.compile(r'[-*+] +|\d+[.)] +|\*{0,2}\w+(?: ?\([^)]*\))?: +')  # bullet or 'name: '


def documents(packages: Sequence[str] | None = None) -> Sequence[list[str]]:
  """All documents as lists of sentences, in a fixed order; computed once per process.

  Args:
    packages: module names to take docstrings from; None: all of PACKAGES that are installed.
  """
  names = tuple(name for name, _ in PACKAGES) if packages is None else tuple(packages)
  return _documents(names)


@functools.cache
def _documents(packages: tuple[str, ...]) -> Sequence[list[str]]:
  found = tuple(_without_repeats(_raw_documents(packages)))
  size = sum(len(sentence.encode()) + 1 for document in found for sentence in document)
  logging.info(
      'Embedded default corpus: %d documents, %.1f MB, sha256 %s, from %s.',
      len(found), size / 1e6, corpus_hash(found), ', '.join(_versions(packages))
  )
  return found


def corpus_hash(found: Iterable[list[str]]) -> str:
  """SHA-256 (first 16 hex digits) over the documents in Google's format."""
  digest = hashlib.sha256()
  for document in found:
    digest.update(('\n'.join(document) + '\n\n').encode())
  return digest.hexdigest()[:16]


def fingerprint() -> list[str]:
  """What the corpus depends on: versions of Python, of the packages and of the rules here."""
  return [*_versions(tuple(name for name, _ in PACKAGES)), f'rules {_RULES}']


def _versions(packages: tuple[str, ...]) -> list[str]:
  distributions = dict(PACKAGES)
  versions = [f'python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}']
  for package in packages:
    for distribution in distributions.get(package, (package,)):
      try:
        versions.append(f'{distribution} {importlib.metadata.version(distribution)}')
        break
      except importlib.metadata.PackageNotFoundError:
        continue
  return versions


def _without_repeats(raw: Iterable[list[str]]) -> Iterator[list[str]]:
  """Documents of two or more new sentences that make up at least half of the document."""
  known: set[bytes] = set()
  for sentences in raw:
    new = []
    for sentence in sentences:
      key = hashlib.blake2b(sentence.lower().encode(), digest_size=8).digest()
      if key not in known:
        known.add(key)
        new.append(sentence)
    if len(new) >= 2 and 2 * len(new) >= len(sentences):
      yield new


def _raw_documents(packages: Iterable[str]) -> Iterator[list[str]]:
  topics = importlib.import_module(TOPICS).topics
  for name in sorted(topics):
    yield prose_of(topics[name])
  known: set[str] = set()  # TensorFlow has many docstrings word for word in v1 and v2.
  for package in packages:
    for path in _source_files(package):
      for docstring in _docstrings(path):
        if docstring not in known:
          known.add(docstring)
          yield prose_of(inspect.cleandoc(docstring))


def _source_files(package: str) -> list[pathlib.Path]:
  """Source files of an installed package without its tests; the package is not imported."""
  spec = importlib.util.find_spec(package)
  if spec is None:
    logging.warning('The package %s is not installed: its docstrings are left out.', package)
    return []
  files = []
  for root in spec.submodule_search_locations or ():
    for path in pathlib.Path(root).rglob('*.py'):
      folders = path.relative_to(root).parts[:-1]
      if not (_SKIPPED_FOLDERS.intersection(folders) or path.stem.endswith('_test')):
        files.append((path.relative_to(root).parts, path))
  return [path for _, path in sorted(files)]


def _docstrings(path: pathlib.Path) -> Iterator[str]:
  """Strings in triple quotes that begin a file or follow a line that ends in a colon.

  Parsing the files by `ast` finds the same (but for functions defined under an `if`) and takes
  seven times as long.
  """
  try:
    source = path.read_text(encoding='utf-8-sig')
  except UnicodeDecodeError:
    return
  if '"""' not in source and "'''" not in source:
    return  # A docstring worth keeping spans lines.
  end, before = 0, ':'  # The end of the last literal or comment; the last character of code.
  for literal in _LITERAL.finditer(source):
    between, end = source[end : literal.start()], literal.end()
    if literal[0].startswith('#'):
      before = between.rstrip()[-1:] or before
      continue
    text = literal['double'] or literal['single'] or ''
    alone = _ALONE.search(between) if len(text) > 80 else None
    if alone and (between[: alone.start()].rstrip()[-1:] or before) == ':':
      text = text if alone['raw'] or '\\' not in text else _unescape(literal[0])
      if len(text) > 80:
        yield text
    before = '"'


def _unescape(literal: str) -> str:
  try:
    return ast.literal_eval(literal)
  except (SyntaxError, ValueError):
    return ''  # Templates and files for other versions of Python.


# --- From a docstring to its sentences -------------------------------------------------------


def prose_of(text: str) -> list[str]:
  """The sentences of a docstring or topic page, without code, tables, headings and markup."""
  sentences = []
  for paragraph in _paragraphs(text):
    if _MARKED.search(paragraph):
      for pattern, plain in _INLINE:
        paragraph = pattern.sub(plain, paragraph)
    sentences += filter(_reads_as_sentence, prose.split_sentences(paragraph, 'en'))
  return sentences


def _reads_as_sentence(sentence: str) -> bool:
  """At least five words, mostly letters, and a full stop at the end."""
  if sentence.count(' ') < 4 or not sentence.endswith(('.', '!', '?', ':', '.)')):
    return False
  letters = sum(map(str.isalpha, sentence)) + sentence.count(' ')
  return letters >= 0.85 * len(sentence)


def _paragraphs(text: str) -> Iterator[str]:
  """Paragraphs of running text, each on one line."""
  lines = _without_code(text.expandtabs().split('\n'))
  lines.append('')
  paragraph: list[str] = []
  indent = 0
  for line, after in zip(lines, [*lines[1:], ''], strict=True):
    content = line.strip()
    depth = len(line) - len(line.lstrip())
    entry = _ENTRY.match(content)
    underlined = bool(_UNDERLINE.fullmatch(after.strip()))
    ends = not content or entry or (paragraph and depth != indent)
    if ends and paragraph:
      yield ' '.join(paragraph)
      paragraph = []
    if not content or underlined or _is_markup(content):
      if paragraph:
        yield ' '.join(paragraph)
        paragraph = []
      continue
    # The lines that follow a bullet or a name are indented like its text, or one level more.
    indent = depth if not entry else _next_depth(after, depth)
    paragraph.append(content[entry.end() :] if entry else content)


def _next_depth(after: str, depth: int) -> int:
  return len(after) - len(after.lstrip()) if after.strip() else depth


def _is_markup(content: str) -> bool:
  return bool(
      content.startswith(('.. ', ':param', ':type', ':returns', ':rtype', '|', '+-', '```', '#'))
      or _SECTION.fullmatch(content)
      or _TYPED.match(content)
      or not any(char.isalpha() for char in content)
  )


def _without_code(lines: list[str]) -> list[str]:
  """Leaves out doctests, fenced and indented code, and directives other than notes."""
  kept: list[str] = []
  fenced = False
  doctest = False
  block: int | None = None  # Lines deeper than this belong to a code block.
  for line in lines:
    content = line.strip()
    depth = len(line) - len(line.lstrip())
    if content.startswith('```'):
      fenced = not fenced
      continue
    if block is not None and content and depth <= block:
      block = None
    doctest = bool(content) and (doctest or content.startswith(('>>>', 'In [')))
    if fenced or doctest or (block is not None and content):
      continue
    if content.startswith('.. '):
      if not _PROSE_DIRECTIVE.match(content):
        block = depth
      kept.append('')
      continue
    if content.endswith('::'):
      block = depth
      line = line.rstrip()[:-1]
    kept.append(line)
  return kept
