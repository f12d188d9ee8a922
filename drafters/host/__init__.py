"""The history drafter, which drafts on the host: texts, suffix tree, n-gram table, lookahead pool and their vote."""
