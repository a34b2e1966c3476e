//! Boot files in the stream.

use std::os::unix::fs::FileExt as _;

use super::*;

fn file(content: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(content, 0).unwrap();
    file
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// The stream of a machine that boots these.
fn stream(boot: BootFiles) -> Vec<u8> {
    let (near, far) = UnixStream::pair().unwrap();
    let reading = thread::spawn(move || {
        let (mut bytes, mut far) = (Vec::new(), far);
        far.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let sender = Sender::new(File::from(OwnedFd::from(near)), &memory(), Vec::new());
    let mut sender = Box::new(sender.with_boot(boot));
    sender.everything(&memory(), ALWAYS).unwrap();
    sender.finish(&info(), machine(), ALWAYS).unwrap();
    reading.join().unwrap()
}

/// The content of kernel and initial RAM disk, and the rest.
type Parts = (Vec<u8>, Vec<u8>, Option<(String, bool)>);

fn received(bytes: &[u8]) -> Result<Parts, SnapshotError> {
    let (kernel, initrd) = (file(&[]), file(&[]));
    let mut boot = ReceivedBoot::new(kernel.try_clone().unwrap(), initrd.try_clone().unwrap());
    receive(bytes, &memory(), &mut [], Some(&mut boot), &mut |_| Ok(()))?;
    Ok((content(&kernel), content(&initrd), boot.complete()))
}

#[test]
fn boot_files_arrive_in_pieces_with_their_command_line() {
    let kernel: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let bytes = stream(BootFiles {
        kernel: file(&kernel),
        initrd: Some(file(b"initrd")),
        cmdline: "root=/dev/vda1 quiet".into(),
    });
    let (got, initrd, rest) = received(&bytes).unwrap();
    assert!(got == kernel && initrd == b"initrd");
    assert_eq!(rest, Some(("root=/dev/vda1 quiet".to_owned(), true)));
    let refused = receive(bytes.as_slice(), &memory(), &mut [], None, &mut |_| Ok(())).unwrap_err();
    assert!(refused.to_string().contains("has its own"), "{refused}");
}

#[test]
fn a_machine_without_an_initrd_arrives_without_one() {
    let bytes = stream(BootFiles {
        kernel: file(b"kernel"),
        initrd: None,
        cmdline: String::new(),
    });
    let (kernel, initrd, rest) = received(&bytes).unwrap();
    assert!(kernel == b"kernel" && initrd.is_empty());
    assert_eq!(rest, Some((String::new(), false)));
}

#[test]
fn a_stream_without_boot_files_completes_none() {
    let (_, _, rest) = received(&STREAM.0).unwrap();
    assert_eq!(rest, None);
}

#[test]
fn wrong_boot_files_are_refused() {
    let cases: [(&[u8], &str); 6] = [
        (&[], "no part"),
        (&[0], "longer than any"),
        (&[3, 1], "unknown boot file"),
        (&[2, 0xff], "no command line"),
        (&[2, b'a', 0], "no command line"),
        (&[2; 2050], "no command line"),
    ];
    for (body, why) in cases {
        let bytes = beginning_with(&[(Kind::Boot, body.to_vec())]);
        let refused = received(&bytes).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
    let twice = [(Kind::Boot, vec![2, b'a']), (Kind::Boot, vec![2, b'b'])];
    let refused = received(&beginning_with(&twice)).unwrap_err().to_string();
    assert!(refused.contains("command line again"), "{refused}");
    let long = [(Kind::Boot, vec![0; (1 << 20) + 2])];
    let refused = received(&beginning_with(&long)).unwrap_err().to_string();
    assert!(refused.contains("piece"), "{refused}");
}
