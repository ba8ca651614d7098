"""SQuAD files and tokenizers small enough to write down, for the tests of question answering."""

import functools
import json
import pathlib

import numpy as np

from bertjax.data import encoding, squad, squad_windows, tokenizer

BRIDGE = (
    'The Varn bridge opened in  1911 after\tthree winters\nof work; its keeper, Ilse Torn, earned'
    ' 4\u202f200 crowns a year.'
)
YEARS = 'Mayor Dol Akers (1895–1943) paid for the clock-tower, not the town.'
CAFE = 'Zoe\u0308, who owns the Cafe\u0301 Kopru\u0308, met I\u0307rem Ak there in 1987.'
JAPANESE = '灯台守は三十年間この岬に住んでいた。'
EMOJI = 'The badge shows a 🦊 over a 🌉 on blue cloth.'
TEXTS = (BRIDGE, YEARS, CAFE, JAPANESE, EMOJI)


@functools.cache
def small_tokenizer(kind: str = 'wordpiece') -> encoding.Tokenizer:
  """Pieces of few letters, so that words are cut in many ways."""
  return tokenizer.train(list(TEXTS) * 3, kind, 150, lowercase=True)


def question(name: str, context: str, answer: str | None = None, **fields) -> squad.Question:
  """A question whose answer stands where it first occurs; none: impossible."""
  answers = () if answer is None else ((answer, context.index(answer)),)
  fields = {'question': 'Who opened the bridge?', 'is_impossible': answer is None, **fields}
  return squad.Question(id=name, context=context, answers=answers, **fields)


def entry(name: str, *answers: tuple[str, int], **fields) -> dict:
  """A question as a file has it."""
  rows = [{'text': text, 'answer_start': start} for text, start in answers]
  return {'id': name, 'question': 'Who?', 'answers': rows, **fields}


def write(path: pathlib.Path, *entries: dict, context: str = BRIDGE, version='1.1') -> pathlib.Path:
  """A file of one paragraph."""
  paragraph = {'context': context, 'qas': list(entries)}
  content = {'version': version, 'data': [{'title': 'Bridges', 'paragraphs': [paragraph]}]}
  path.write_text(json.dumps(content), encoding='utf-8')
  return path


def oracle(windows: squad_windows.Windows) -> np.ndarray:
  """Logits of a model that knows the labels; where the label is [CLS] it is less sure."""
  longest = int(max(windows.examples.lengths, default=1))
  outputs = np.full((len(windows), longest + 3, 2), -10, np.float32)
  rows = np.arange(len(windows))
  for side, name in enumerate(('start_positions', 'end_positions')):
    positions = windows.examples.values[name]
    outputs[rows, positions, side] = np.where(positions > 0, 20, 5)
  return outputs
