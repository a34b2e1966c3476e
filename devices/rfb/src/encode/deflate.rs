//! A zlib stream that continues across rectangles.

use flate2::{Compress, Compression, FlushCompress};

/// One stream. It is made when it is used first: its tables have some 300 KiB.
#[derive(Default)]
pub struct Stream {
    compress: Option<Box<Compress>>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("begun", &self.compress.is_some())
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// Appends `data`, compressed and flushed: a reader can decompress all of `data` from the bytes
    /// appended up to this point.
    pub fn append(&mut self, data: &[u8], out: &mut Vec<u8>) {
        /// Room for the marks of a flush, beyond the size of the data.
        const ROOM: usize = 64;
        let compress = self
            .compress
            .get_or_insert_with(|| Box::new(Compress::new(Compression::fast(), true)));
        let mut left = data;
        loop {
            let before = compress.total_in();
            out.reserve(left.len().saturating_div(2).saturating_add(ROOM));
            // The only error is a stream that was ended, which this one never is.
            let _status = compress.compress_vec(left, out, FlushCompress::Sync);
            let taken = usize::try_from(compress.total_in().saturating_sub(before)).unwrap_or(usize::MAX);
            left = left.get(taken..).unwrap_or_default();
            // Room that was left over says that nothing is held back.
            if left.is_empty() && out.len() < out.capacity() {
                return;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use flate2::{Decompress, FlushDecompress};
    use vmm_base::thread::{ThreadKind, spawn};

    use super::*;

    #[test]
    fn a_stream_begins_in_the_thread_of_a_screen() {
        let data = [7; 5000];
        let deflated = spawn(ThreadKind::Screen, "screen", move || {
            let mut out = Vec::new();
            Stream::default().append(&data, &mut out);
            out
        });
        // A stack that is too small would end the process.
        let deflated = deflated.unwrap().join().unwrap();
        let mut inflated = Vec::with_capacity(data.len() + 1);
        Decompress::new(true)
            .decompress_vec(&deflated, &mut inflated, FlushDecompress::Sync)
            .unwrap();
        assert_eq!(inflated, data);
    }
}
