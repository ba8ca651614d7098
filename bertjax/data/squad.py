"""SQuAD v1.1 and v2.0 files, and those in their form (CMRC 2018, XQuAD), read and checked.

    python -m bertjax.data.squad train-v1.1.json --version 1      # what training would leave out

Contexts stay as the file has them: an answer's start counts code points of the original text.
"""

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

from absl import logging
from etils import epath

from bertjax.data import console

# So many ids are named in a message; a file with the wrong offsets throughout has thousands.
_NAMED = 20


class SquadError(ValueError):
  """Data, predictions or settings that cannot be used; the message names the file and the mend."""


@dataclasses.dataclass(frozen=True)
class Question:
  """One question.

  Attributes:
    id: unique in its file.
    question: its text.
    context: the paragraph, exactly as in the file; questions of a paragraph share the string.
    answers: (text, start) of each gold answer, start in code points of the context; for training
      only the one to train on, its start checked.
    is_impossible: v2.0's word that the context has no answer.
  """

  id: str
  question: str
  context: str
  answers: tuple[tuple[str, int], ...]
  is_impossible: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
  """What reading for training changed.

  Attributes:
    repaired: question id -> the start that stands in for a wrong one.
    left_out: question id -> why it is not trained on.
  """

  repaired: dict[str, int] = dataclasses.field(default_factory=dict)
  left_out: dict[str, str] = dataclasses.field(default_factory=dict)


def read(
    path: epath.PathLike, version: int, training: bool = False, strict: bool = False
) -> tuple[Question, ...]:
  """The questions of a file; see read_with_report. What training leaves out is logged."""
  questions, report = read_with_report(path, version, training, strict)
  if report.repaired:
    logging.warning('%s: the start of %d answers was wrong and could be repaired: %s', path,
                    len(report.repaired), _shorten(report.repaired))
  for reason, ids in _by_reason(report).items():
    logging.warning('%s: %d questions left out of training, %s: %s', path, len(ids), reason,
                    _shorten(ids))
  return questions


def read_with_report(
    path: epath.PathLike, version: int, training: bool = False, strict: bool = False
) -> tuple[tuple[Question, ...], Report]:
  """Reads and checks a file.

  For training, context[start:start + len(text)] must be the text. Where it is not, the start is
  repaired if the text stands in the context exactly once; otherwise the question is left out.
  Without training every question is kept, and offsets do not matter: scores go by texts.

  Args:
    path: a JSON file in SQuAD's form.
    version: 1, or 2 for questions without an answer. v1.1 files can be read as either.
    training: whether to check answers and leave out what cannot be trained on.
    strict: stop at the first file with a wrong offset or an answer missing.

  Raises:
    SquadError: no such file, not UTF-8 or JSON, keys missing, an id twice, unanswerable questions
      with version 1, or with `strict` anything the report would hold.
  """
  if version not in (1, 2):
    raise SquadError(f'version={version!r} is neither 1 (SQuAD v1.1) nor 2 (SQuAD v2.0)')
  content = _load(path)
  questions = list(_questions(content, path))
  _check_ids(questions, path)
  _check_version(questions, content, version, path)
  if not training:
    return tuple(questions), Report()
  report = Report()
  checked = [_check_answers(question, version, report) for question in questions]
  if strict and (report.repaired or report.left_out):
    raise SquadError(
        f'{path}: {len(report.repaired)} answers with a wrong start'
        f' ({_shorten(report.repaired) or "none"}) and {len(report.left_out)} questions that cannot'
        f' be trained on ({_shorten(report.left_out) or "none"}); mend the file or read it without'
        ' strict'
    )
  return tuple(question for question in checked if question is not None), report


def detect_version(path: epath.PathLike) -> int:
  """2 where the file says so or has questions without an answer, else 1.

  Raises:
    SquadError: as read_with_report.
  """
  content = _load(path)
  return 2 if _claims_v2(content) or _unanswerable(list(_questions(content, path))) else 1


def _load(path: epath.PathLike) -> dict[str, Any]:
  path = epath.Path(path)
  if not path.exists() or path.is_dir():
    raise SquadError(f'{path}: no such file; give the path of a JSON file in SQuAD form')
  try:
    content = json.loads(path.read_bytes().decode('utf-8-sig'))
  except UnicodeDecodeError as error:
    raise SquadError(
        f'{path}: not UTF-8 at byte {error.start}; SQuAD files are JSON in UTF-8 (unpack it if it'
        ' is compressed)'
    ) from error
  except json.JSONDecodeError as error:
    raise SquadError(
        f'{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}); if the file'
        ' ends there, copy or download it again'
    ) from error
  except RecursionError as error:
    raise SquadError(f'{path}: JSON nested too deeply to be a SQuAD file') from error
  if not isinstance(content, dict) or not isinstance(content.get('data'), list):
    raise SquadError(
        f'{path}: no list "data" at the top; a SQuAD file is'
        ' {"version": ..., "data": [{"title": ..., "paragraphs": [...]}]}'
    )
  return content


def _questions(content: dict[str, Any], path: epath.PathLike) -> Iterator[Question]:
  for number, article in enumerate(content['data']):
    where = f'{path}: data[{number}]'
    for index, paragraph in enumerate(_field(article, 'paragraphs', list, where)):
      place = f'{where}.paragraphs[{index}]'
      context = _field(paragraph, 'context', str, place)
      for row, entry in enumerate(_field(paragraph, 'qas', list, place)):
        yield _question(entry, context, f'{place}.qas[{row}]')


def _field(entry: Any, name: str, kind: type, where: str) -> Any:
  """entry[name], or an error that says where in the file it should be."""
  if not isinstance(entry, dict) or name not in entry:
    keys = ', '.join(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
    raise SquadError(f'{where}: no "{name}" (there is: {keys or "nothing"}); not in SQuAD form')
  value = entry[name]
  # A bool is an int to Python, not to SQuAD.
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise SquadError(
        f'{where}: "{name}" is {json.dumps(value)[:60]}, not of type {kind.__name__}'
    )
  return value


def _question(entry: Any, context: str, where: str) -> Question:
  name = _field(entry, 'id', str, where)
  where = f'{where} (id {name!r})'
  # Files to predict on may have no answers at all.
  answers = _field(entry, 'answers', list, where) if 'answers' in entry else []
  impossible = _field(entry, 'is_impossible', bool, where) if 'is_impossible' in entry else False
  return Question(
      name,
      _field(entry, 'question', str, where),
      context,
      tuple(
          (
              _field(answer, 'text', str, f'{where}.answers[{number}]'),
              _field(answer, 'answer_start', int, f'{where}.answers[{number}]'),
          )
          for number, answer in enumerate(answers)
      ),
      impossible,
  )


def _check_ids(questions: list[Question], path: epath.PathLike) -> None:
  if not questions:
    raise SquadError(f'{path}: has no questions')
  counts = collections.Counter(question.id for question in questions)
  twice = [name for name, count in counts.items() if count > 1]
  if twice:
    raise SquadError(
        f'{path}: {len(twice)} ids stand there more than once ({_shorten(twice)}); predictions go'
        ' by id, so give every question its own'
    )


def _claims_v2(content: dict[str, Any]) -> bool:
  return str(content.get('version', '')).lower().removeprefix('v').startswith('2')


def _unanswerable(questions: list[Question]) -> list[str]:
  return [question.id for question in questions if question.is_impossible]


def _check_version(
    questions: list[Question], content: dict[str, Any], version: int, path: epath.PathLike
) -> None:
  """A v2.0 file read as v1.1 would train and score answers that do not exist (B100)."""
  unanswerable = _unanswerable(questions)
  if version == 1 and not unanswerable and _claims_v2(content):
    unanswerable = [question.id for question in questions if not question.answers]
  if version == 1 and unanswerable:
    raise SquadError(
        f'{path}: {len(unanswerable)} of {len(questions)} questions have no answer'
        f' ({_shorten(unanswerable)}): this is a SQuAD v2.0 file, but version=1 is set; set'
        ' version=2 (finetune: --config=configs/finetune/squad.py:version=2; tools: --version 2)'
    )
  if version == 2 and not unanswerable and any(question.answers for question in questions):
    logging.info('%s: read with version=2, but every question has an answer: a v1.1 file?', path)


def _check_answers(question: Question, version: int, report: Report) -> Question | None:
  """The question with the one answer to train on, or None with the reason in the report."""
  if version == 2 and question.is_impossible:
    # Plausible answers are no labels, and neither are answers to what is said to have none.
    return dataclasses.replace(question, answers=())
  if not question.answers:
    report.left_out[question.id] = 'no answer given' + (
        ' though not marked impossible' if version == 2 else ''
    )
    return None
  context = question.context
  for text, start in question.answers:
    if text and start >= 0 and context.startswith(text, start):
      return dataclasses.replace(question, answers=((text, start),))
  for text, _ in question.answers:
    start = context.find(text) if text else -1
    # From start + 1, so that overlapping places count as two.
    if start >= 0 and context.find(text, start + 1) < 0:
      report.repaired[question.id] = start
      return dataclasses.replace(question, answers=((text, start),))
  found = any(text and text in context for text, _ in question.answers)
  report.left_out[question.id] = (
      'wrong start, and the text stands in the context more than once' if found
      else 'the text is not in the context'
  )
  return None


def _shorten(ids: dict[str, Any] | list[str]) -> str:
  """The first few ids, with what they stand for where that is a start."""
  parts = [
      f'{name} -> {ids[name]}' if isinstance(ids, dict) and isinstance(ids[name], int) else name
      for name in list(ids)[:_NAMED]
  ]
  return ', '.join(parts) + (f' and {len(ids) - _NAMED} more' if len(ids) > _NAMED else '')


def _by_reason(report: Report) -> dict[str, list[str]]:
  groups: dict[str, list[str]] = {}
  for name, reason in report.left_out.items():
    groups.setdefault(reason, []).append(name)
  return groups


def main(arguments: list[str] | None = None) -> int:
  """Prints what training on a file would repair and leave out; 2 if that cannot be or may not."""
  parser = argparse.ArgumentParser(prog='python -m bertjax.data.squad', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('input', help='JSON file in SQuAD form')
  parser.add_argument('--version', type=int, choices=(1, 2),
                      help='1 or 2 (default: what the file looks like)')
  parser.add_argument('--strict', action='store_true',
                      help='take a wrong offset or a missing answer for an error')
  args = parser.parse_args(arguments)
  console.log_plainly()
  try:
    version = args.version or detect_version(args.input)
    questions, report = read_with_report(args.input, version, training=True, strict=args.strict)
  except (SquadError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  rows = {
      'version': version,
      'questions': len(questions),
      'unanswerable': sum(not question.answers for question in questions),
      **dataclasses.asdict(report),
  }
  print(json.dumps(rows, indent=2))
  return 0


if __name__ == '__main__':
  sys.exit(main())
