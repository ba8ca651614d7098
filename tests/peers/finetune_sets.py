"""Cuts small sets into train and dev, the same for both frameworks of finetune_compare.py.

    python tests/peers/finetune_sets.py DATA    # from ../shared, or BERTJAX_SHARED

squad      the 16 articles of the half dev set of v2.0: the last 4 are dev, the first 12 train;
           squad1-*: answerable questions only (read as v1.1), squad2-*: all of them; of both about
           500 questions to train on and 300 of dev, drawn evenly
hellaswag  of 1,000 validation rows the first 300 train, the last 200 are dev
wnut17     the first 2,000 sentences of the training file
"""

import copy
import json
import os
import pathlib
import random
import re
import sys

SHARED = pathlib.Path(os.environ.get('BERTJAX_SHARED', '../shared')) / 'data'
TRAIN_QUESTIONS, DEV_QUESTIONS, DEV_ARTICLES = 500, 300, 4


def keep(articles: list, wanted) -> list:
  """The articles with the questions that `wanted(question)` keeps; empty paragraphs go."""
  articles = copy.deepcopy(articles)
  for article in articles:
    for paragraph in article['paragraphs']:
      paragraph['qas'] = [qa for qa in paragraph['qas'] if wanted(qa)]
    article['paragraphs'] = [p for p in article['paragraphs'] if p['qas']]
  return articles


def draw(articles: list, number: int) -> list:
  """About so many of the questions, whichever seed 0 draws."""
  ids = [qa['id'] for a in articles for p in a['paragraphs'] for qa in p['qas']]
  chosen = set(random.Random(0).sample(ids, min(number, len(ids))))
  return keep(articles, lambda qa: qa['id'] in chosen)


def squad(out: pathlib.Path) -> None:
  """Versions 1 and 2 of the articles."""
  content = json.loads((SHARED / 'squad/squad2-dev-half-cs224n.json').read_text(encoding='utf-8'))
  for version, wanted in ((1, lambda qa: not qa['is_impossible']), (2, lambda qa: True)):
    articles = keep(content['data'], wanted)
    parts = {'train': draw(articles[:-DEV_ARTICLES], TRAIN_QUESTIONS),
             'dev': draw(articles[-DEV_ARTICLES:], DEV_QUESTIONS)}
    for name, part in parts.items():
      text = json.dumps({'version': f'v{version}', 'data': part})
      (out / f'squad{version}-{name}.json').write_text(text, encoding='utf-8')


def hellaswag(out: pathlib.Path) -> None:
  """Rows as they come."""
  path = SHARED / 'multiple_choice/hellaswag_val_1000.jsonl'
  rows = path.read_text(encoding='utf-8').split('\n')[:1000]
  for name, part in (('train', rows[:300]), ('dev', rows[-200:])):
    (out / f'hellaswag-{name}.jsonl').write_text('\n'.join(part) + '\n', encoding='utf-8')


def wnut17(out: pathlib.Path) -> None:
  """Sentences as they come."""
  text = (SHARED / 'ner/wnut17/wnut17train.conll').read_text(encoding='utf-8')
  sentences = [part for part in re.split(r'\n\s*\n', text) if part.strip()][:2000]
  (out / 'wnut17-train.conll').write_text('\n\n'.join(sentences) + '\n', encoding='utf-8')


def main():
  out = pathlib.Path(sys.argv[1])
  out.mkdir(parents=True, exist_ok=True)
  squad(out)
  hellaswag(out)
  wnut17(out)


if __name__ == '__main__':
  main()
