"""What a layer's keys and query rows are like: means and covariances that rules quantize with."""
