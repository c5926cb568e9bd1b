"""Selection in CuTe DSL: two kernels that find the top-k of rows of scores, SM90 on."""
