"""Mathematical expressions from untrusted text: tokens, forms, parser, terms, intervals, equality. Runs no code."""
