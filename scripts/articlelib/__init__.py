"""What `reproduce_articles.py` is made of: the articles' claims, what is measured for each, the rules that judge."""
