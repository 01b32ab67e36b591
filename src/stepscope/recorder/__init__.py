"""Records a training run from inside its process. Needs only torch and the standard library."""
