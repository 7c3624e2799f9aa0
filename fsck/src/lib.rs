//! A second reader of the stratakv format.
