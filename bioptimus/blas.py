"""What is known of the library under NumPy's products of matrices."""

# BLAS takes threads for products of more multiplications than some 260,000. Ours are the
# parallelism: more of them would fight over the cores, and spin for 70 ms afterwards, on a core
# that could read tiles by then.
ONE_THREAD_PRODUCT = 200_000
"""So many multiplications stay on the calling thread."""
