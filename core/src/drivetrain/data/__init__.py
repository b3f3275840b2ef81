"""Loading data: who gets which samples, in which order, and where a loader stands.

``plan`` is the arithmetic, ``order`` the order of an epoch, ``indexed``, ``stream`` and ``dispatch`` three ways of
reading, ``loader`` what the user iterates, ``progress`` and ``skipping`` how it resumes, ``rows`` what metrics keep.

Nothing is imported here: an Accelerator needs the loaders only once one is prepared.
"""
