"""One replica, from nothing to hot; the same program in a process tree and in a pod."""
