"""Update rules on flat shards, and learning-rate schedules."""
