"""Questions and their contexts as windows: [CLS] question [SEP] part of the context [SEP].

A context that does not fit is seen through overlapping windows, `doc_stride` tokens apart. Every
context token counts in the one window where it has most context on both sides. Source of the
layout: Devlin et al. 2018, section 4.2; google-research/bert, run_squad.py
(convert_examples_to_features).
"""

import dataclasses
import functools
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np
from absl import logging
from jaxtyping import Bool, Int

from bertjax.data.encoding import Tokenizer
from bertjax.data.examples import Examples
from bertjax.data.squad import Question, SquadError

# Where Google's numbering of windows begins.
_FIRST_ID = 1_000_000_000
# [CLS], and a [SEP] after the question and after the text.
_SPECIALS = 3


class Context(NamedTuple):
  """A tokenised context.

  Attributes:
    ids: its tokens.
    offsets: (start, end) of each token in code points of the context.
  """

  ids: Int[np.ndarray, 'N']
  offsets: Int[np.ndarray, 'N 2']


class Layout(NamedTuple):
  """How the windows lie on a context of N tokens; windows and tokens are counted from 0.

  Attributes:
    starts: first context token of each window.
    counts: context tokens of each window.
    best_first, best_last: the tokens from best_first to before best_last have their maximal
      context in this window.
  """

  starts: Int[np.ndarray, 'K']
  counts: Int[np.ndarray, 'K']
  best_first: Int[np.ndarray, 'K']
  best_last: Int[np.ndarray, 'K']


@dataclasses.dataclass(frozen=True)
class Windows:
  """N windows over the contexts of Q questions, those of a question together and in its order.

  Attributes:
    examples: what a model sees; `start_positions` and `end_positions` among its values when made
      for training. [CLS] is at position 0.
    question: index of each window's question.
    unique_ids: Google's number of each window.
    text_start: the window's first position that is context.
    first: the context token that stands there.
    count: how many context tokens the window has.
    best_first, best_last: the context tokens with their maximal context in this window.
    contexts: the tokenised contexts.
    context: index of each window's context in `contexts`.
  """

  examples: Examples
  question: Int[np.ndarray, 'N']
  unique_ids: Int[np.ndarray, 'N']
  text_start: Int[np.ndarray, 'N']
  first: Int[np.ndarray, 'N']
  count: Int[np.ndarray, 'N']
  best_first: Int[np.ndarray, 'N']
  best_last: Int[np.ndarray, 'N']
  contexts: tuple[Context, ...]
  context: Int[np.ndarray, 'N']

  def __len__(self) -> int:
    return len(self.question)

  def offsets(self, window: SupportsIndex) -> Int[np.ndarray, 'L 2']:
    """(start, end) of each token in code points of the context, -1 for what is not context."""
    offsets = np.full((len(self.examples.tokens['input_ids'][window]), 2), -1, np.int32)
    first, start, count = self.first[window], self.text_start[window], self.count[window]
    context = self.contexts[self.context[window]]
    offsets[start:start + count] = context.offsets[first:first + count]
    return offsets

  def max_context(self, window: SupportsIndex) -> Bool[np.ndarray, 'L']:
    """True for context tokens with more context here than in any other window of the question."""
    flags = np.zeros(len(self.examples.tokens['input_ids'][window]), bool)
    shift = self.text_start[window] - self.first[window]
    flags[self.best_first[window] + shift:self.best_last[window] + shift] = True
    return flags


@dataclasses.dataclass
class _Counts:
  """What is said about the windows in the log."""

  questions_cut: int = 0
  questions_without_text: int = 0
  answers_without_token: int = 0
  windows_without_answer: int = 0


def windows(
    questions: Sequence[Question], tokenizer: Tokenizer, max_length: int = 384,
    doc_stride: int = 128, max_query_length: int = 64, training: bool = False,
) -> Windows:
  """The windows of all questions, in their order.

  A question is cut to max_query_length tokens. Windows are doc_stride tokens apart, or as far as
  their text is long where that is less, so that every token is in one. A context without any token
  gives no window. In training a window without the whole answer is labelled with [CLS], as in
  Google's code; their number is logged. A question whose answer has no token of its own (white
  space, say) is left out of training.

  Args:
    questions: as squad.read gives them; read with training=True if `training`.
    tokenizer: its encode gives code-point offsets.
    max_length: tokens of a window at most, special ones included.
    doc_stride: tokens from one window's text to the next one's.
    max_query_length: tokens of a question at most.
    training: whether to label the windows.

  Raises:
    SquadError: lengths that leave no room for text, or in training an answer that does not stand
      at its start.
  """
  _check_lengths(max_length, doc_stride, max_query_length)
  contexts, context_of = _contexts(questions, tokenizer)
  queries = tokenizer.encode_batch([question.question for question in questions])
  rows = _Rows(tokenizer, max_length)
  counts = _Counts()
  starts, ends = [], []
  for number, question in enumerate(questions):
    query, context = queries[number], contexts[context_of[question.context]]
    counts.questions_cut += len(query) > max_query_length
    counts.questions_without_text += not len(context.ids)
    query = query[:max_query_length]
    layout = make_layout(len(context.ids), max_length - _SPECIALS - len(query), doc_stride)
    if training:
      answer = _answer_tokens(question, context)
      if answer is None:
        counts.answers_without_token += 1
        continue
      start, end, missing = _labels(layout, answer, len(query) + 2)
      counts.windows_without_answer += missing if question.answers else 0
      starts.append(start)
      ends.append(end)
    rows.add(query, context.ids, layout, (number, context_of[question.context]))
  values = {}
  if training:
    values = {'start_positions': _flat(starts), 'end_positions': _flat(ends)}
  made = rows.windows(values, contexts)
  _log(made, len(questions), counts, training)
  return made


def _check_lengths(max_length: int, doc_stride: int, max_query_length: int) -> None:
  """Settings under which a full question would leave no room for text (B087) are refused."""
  if max_query_length < 1 or doc_stride < 1:
    raise SquadError(
        f'max_query_length {max_query_length} and doc_stride {doc_stride} must be at least 1'
    )
  if max_length <= max_query_length + _SPECIALS:
    raise SquadError(
        f'max_length {max_length} leaves no room for text beside a question of max_query_length'
        f' {max_query_length} and {_SPECIALS} special tokens; take a max_length of at least'
        f' {max_query_length + _SPECIALS + 1}, or a max_query_length of at most'
        f' {max_length - _SPECIALS - 1}'
    )


def _contexts(
    questions: Sequence[Question], tokenizer: Tokenizer
) -> tuple[tuple[Context, ...], dict[str, int]]:
  """Every different context tokenised once, and its index."""
  index: dict[str, int] = {}
  for question in questions:
    index.setdefault(question.context, len(index))
  return tuple(tokenise(context, tokenizer) for context in index), index


def tokenise(context: str, tokenizer: Tokenizer) -> Context:
  """A context's tokens; each offset takes in the combining marks that follow the token's text.

  A tokenizer that strips accents sees no marks in decomposed text; without them an answer's last
  letter would lose its accent.
  """
  encoding = tokenizer.encode(context)
  offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
  if not context.isascii():
    marks = np.array([unicodedata.category(letter)[0] == 'M' for letter in context] + [False])
    # For each place, the first one from there on that holds no mark.
    after = np.minimum.accumulate(
        np.where(marks, len(context), np.arange(len(context) + 1))[::-1]
    )[::-1].astype(np.int32)
    # Marks that are a token of their own stay that token's, and go no further than it.
    limit = np.append(offsets[1:, 0], len(context))
    ends = offsets[:, 1]
    offsets[:, 1] = np.maximum(ends, np.minimum(after[ends], limit))
  return Context(np.array(encoding.ids, np.int32), offsets)


@functools.lru_cache(maxsize=1024)
def make_layout(num_tokens: int, room: int, doc_stride: int) -> Layout:
  """Windows of at most `room` of num_tokens tokens, and where each token has most context.

  A token's context in a window is the smaller of the numbers of tokens before and after it there,
  plus a hundredth of the window's length; of equals the first window has it. (run_squad.py,
  _check_is_max_context.)
  """
  # A longer step would leave tokens out between two windows (B088).
  step = min(doc_stride, room)
  last = max(0, -(-(num_tokens - room) // step))
  starts = np.arange(last + 1, dtype=np.int32) * step if num_tokens else np.zeros(0, np.int32)
  counts = np.minimum(room, num_tokens - starts).astype(np.int32)
  best = np.full(num_tokens, -1.0)
  owner = np.zeros(num_tokens, np.int32)
  for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
    before = np.arange(count)
    score = np.minimum(before, before[::-1]) + 0.01 * float(count)
    better = score > best[start:start + count]
    best[start:start + count][better] = score[better]
    owner[start:start + count][better] = number
  # Owners ascend, for of two windows the later one gains with every token.
  order = np.arange(len(starts))
  first = np.searchsorted(owner, order, 'left').astype(np.int32)
  return Layout(starts, counts, first, np.searchsorted(owner, order, 'right').astype(np.int32))


def _answer_tokens(question: Question, context: Context) -> tuple[int, int] | None:
  """First and last context token of the answer; (-1, -1) if there is none to find, None if it has
  no token.

  They are the tokens that share a character with it: the tightest span, also inside a word and in
  text without white space (B101). Where two tokens share a character (the parts of a decomposed
  one), the one that keeps the span tight counts.
  """
  if not question.answers:
    return -1, -1
  text, start = question.answers[0]
  if start < 0 or not question.context.startswith(text, start):
    raise SquadError(
        f'question {question.id!r}: its answer {text!r} does not stand at {start} in the context;'
        ' read the file with training=True, which repairs or leaves out such questions'
    )
  end = start + len(text)
  shared = np.flatnonzero((context.offsets[:, 1] > start) & (context.offsets[:, 0] < end))
  if not len(shared):
    return None
  begins, ends = context.offsets[shared].T.tolist()
  begin = max((place for place in begins if place <= start), default=begins[0])
  last = min((place for place in ends if place >= end), default=ends[-1])
  first_token, last_token = begins.index(begin), len(ends) - 1 - ends[::-1].index(last)
  if first_token > last_token:
    first_token, last_token = 0, len(ends) - 1
  return int(shared[first_token]), int(shared[last_token])


def _labels(
    layout: Layout, answer: tuple[int, int], text_start: int
) -> tuple[Int[np.ndarray, 'K'], Int[np.ndarray, 'K'], int]:
  """Start and end position in each window, 0 ([CLS]) where it lacks a part of the answer."""
  first, last = answer
  inside = (first >= layout.starts) & (last < layout.starts + layout.counts)
  shift = text_start - layout.starts
  missing = len(inside) - int(inside.sum())
  return np.where(inside, first + shift, 0), np.where(inside, last + shift, 0), missing


class _Rows:
  """Gathers the windows' tokens.

  Segment ids and masks of all windows are views into a few arrays: 130,000 windows of their own
  would take twice the memory of the tokens.
  """

  def __init__(self, tokenizer: Tokenizer, max_length: int):
    self._tokenizer = tokenizer
    self._max_length = max_length
    self._cls = np.array([tokenizer.cls_id], np.int32)
    self._sep = np.array([tokenizer.sep_id], np.int32)
    self._ones = np.ones(max_length, np.int32)
    self._ones.setflags(write=False)
    self._types: dict[int, Int[np.ndarray, 'T']] = {}
    self._input_ids: list[Int[np.ndarray, '_']] = []
    self._token_type_ids: list[Int[np.ndarray, '_']] = []
    self._layouts: list[Layout] = []
    # (question, context, text_start) of each window.
    self._numbers: list[tuple[int, int, int]] = []

  def add(
      self, query: Int[np.ndarray, 'Q'], context_ids: Int[np.ndarray, 'N'], layout: Layout,
      numbers: tuple[int, int],
  ) -> None:
    """Adds the windows of a question; numbers: the index of the question and of its context."""
    text_start = len(query) + 2
    types = self._types.get(text_start)
    if types is None:
      types = (np.arange(self._max_length) >= text_start).astype(np.int32)
      types.setflags(write=False)
      self._types[text_start] = types
    for start, count in zip(layout.starts.tolist(), layout.counts.tolist(), strict=True):
      text = context_ids[start:start + count]
      self._input_ids.append(np.concatenate([self._cls, query, self._sep, text, self._sep]))
      self._token_type_ids.append(types[:text_start + count + 1])
    self._layouts.append(layout)
    self._numbers += [(*numbers, text_start)] * len(layout.starts)

  def windows(
      self, values: dict[str, Int[np.ndarray, '_']], contexts: tuple[Context, ...]
  ) -> Windows:
    """All that was added, with these values of the examples."""
    tokens = {
        'input_ids': self._input_ids,
        'token_type_ids': self._token_type_ids,
        'attention_mask': [self._ones[:len(row)] for row in self._input_ids],
    }
    numbers = np.array(self._numbers, np.int32).reshape(-1, 3)
    starts, counts, best_first, best_last = (
        _flat([layout[column] for layout in self._layouts]) for column in range(4)
    )
    return Windows(
        examples=Examples(tokens, values, self._tokenizer.pad_id),
        question=numbers[:, 0],
        unique_ids=_FIRST_ID + np.arange(len(numbers)),
        text_start=numbers[:, 2],
        first=starts,
        count=counts,
        best_first=best_first,
        best_last=best_last,
        contexts=contexts,
        context=numbers[:, 1],
    )


def _flat(rows: Iterable[Int[np.ndarray, '_']]) -> Int[np.ndarray, 'N']:
  return np.concatenate([np.zeros(0, np.int32), *rows]).astype(np.int32)


def _log(made: Windows, num_questions: int, counts: _Counts, training: bool) -> None:
  logging.info(
      'SQuAD: %d windows of %d questions; %d questions cut to max_query_length; %d questions have'
      ' a context without any token, and so no window', len(made), num_questions,
      counts.questions_cut, counts.questions_without_text,
  )
  if training:
    logging.info(
        'SQuAD: %d windows lack the answer and are labelled with [CLS]; %d questions left out, for'
        ' their answer has no token', counts.windows_without_answer, counts.answers_without_token,
    )
