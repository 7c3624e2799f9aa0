//! A fixed random rotation: random signs, then a Walsh-Hadamard transform. It costs `n log n`.

/// Rotates a vector of a power of two elements. The rotation is the same for every vector and keeps lengths.
pub(crate) fn rotate_randomly(x: &mut [f32]) {
    let n = x.len();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for x in x.iter_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if state & 1 << 40 != 0 {
            *x = -*x;
        }
    }
    let mut half = 1;
    while half < n {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = 1.0 / (n as f32).sqrt();
    x.iter_mut().for_each(|x| *x *= scale);
}
