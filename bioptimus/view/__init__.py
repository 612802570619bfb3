"""Pictures of result files: overview, embedding map, heatmap, clusters, nearest tiles.

The arithmetic (``components``, ``clusters``, ``colours``, ``lattice``) needs numpy alone and is
shared with the HTML report; ``figures`` draws with matplotlib, the extra ``view``.
"""
