"""Word borders given with the text: words are what white space separates.

Whole-word masking takes a word's pieces from the tokenizer. In Chinese or Japanese that makes each
ideograph a word of its own; text that was segmented beforehand ('灯台守 は 岬 に') says better.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from bertjax.data.encoding import Tokenizer

# White space as Google's tokenization.py has it: tab, line ends and the Unicode class Zs.
_WORD = re.compile('[^ \t\r\n\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]+')


def encode_words(
    tokenizer: Tokenizer, sentences: Sequence[str]
) -> tuple[Int[np.ndarray, 'N'], Int[np.ndarray, 'L'], Bool[np.ndarray, 'N']]:
  """Ids of the sentences back to back, tokens in each, and whether each token begins a word.

  The ids are those of `tokenizer.encode_lines`: WordPiece never looks past white space, so its
  words can be encoded one by one. SentencePiece marks white space in its pieces.
  """
  if tokenizer.type == 'sentencepiece':
    ids, counts = tokenizer.encode_lines(sentences)
    return ids, counts, ~tokenizer.continuation[ids]
  words = [_WORD.findall(sentence) for sentence in sentences]
  ids, counts = tokenizer.encode_lines([word for row in words for word in row])
  starts = np.zeros(len(ids), bool)
  ends = np.cumsum(counts)
  starts[(ends - counts)[counts > 0]] = True
  # Tokens up to the end of each sentence, from its words' token counts.
  rows = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))
  totals = np.concatenate([[0], ends])[np.concatenate([[0], rows])]
  return ids, np.diff(totals).astype(np.int32), starts
