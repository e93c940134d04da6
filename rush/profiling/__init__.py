"""Profiles of a step: the kernels that ran, the breakdown of its time, exposed communication."""
