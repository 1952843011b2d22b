"""Which sentence does a model that says one piece after another mean: the search over its log-probabilities, apart from any framework?"""
