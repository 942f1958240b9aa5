"""Mathematical expressions from untrusted text: tokens, forms, parser, terms, intervals, equality. Runs none of it."""
