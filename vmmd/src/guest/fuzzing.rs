//! Entry point of the fuzz target for agents (`vmmd/fuzz`). The bytes are the answers of an agent
//! to the questions about its guest. It panics when the description is out of bounds. The tests
//! here run it over the seeds and over generated input.

use prost::Message as _;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
};
use uuid::Uuid;
use vmmd_api::v1;

use super::{Session, info};
use crate::registry::agents::Agents;

/// Longest description in bytes.
const LONGEST: usize = 32 << 10;

/// Has an agent give these answers, one on each line.
pub fn agent_answers(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else {
        return;
    };
    let described = runtime.block_on(async {
        let (ours, theirs) = UnixStream::pair().ok()?;
        let asking = async {
            let turn = Agents::default().turn(Uuid::nil()).await;
            let mut session = Session::begin(ours, turn).await.ok()?;
            info::ask(&mut session).await.ok()
        };
        tokio::join!(asking, play(theirs, data)).0
    });
    if let Some(guest) = described {
        check(&guest);
    }
}

/// An agent that connects honestly, and answers with the lines of `data`.
async fn play(stream: UnixStream, data: &[u8]) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut answers = data.split(|byte| *byte == b'\n');
    let mut line = Vec::new();
    while stream.read_until(b'\n', &mut line).await? != 0 {
        let question = line.strip_prefix(&[0xff]).unwrap_or(&line);
        let question: Value = serde_json::from_slice(question)?;
        let id = question.pointer("/arguments/id");
        let answer = match id {
            Some(id) => [b"\xff{\"return\": ".as_slice(), id.to_string().as_bytes(), b"}"].concat(),
            None => answers.next().unwrap_or(b"{\"return\": {}}").to_vec(),
        };
        stream.write_all(&answer).await?;
        stream.write_all(b"\n").await?;
        line.clear();
    }
    Ok(())
}

fn check(guest: &v1::GuestInfo) {
    assert!(guest.encoded_len() <= LONGEST, "{} bytes", guest.encoded_len());
    let os = guest
        .os
        .iter()
        .flat_map(|os| [&os.name, &os.pretty_name, &os.version, &os.id]);
    let interfaces = guest.interfaces.iter().flat_map(|it| [&it.name, &it.mac]);
    let file_systems = guest
        .file_systems
        .iter()
        .flat_map(|it| [&it.name, &it.mount_point]);
    let users = guest.users.iter().map(|user| &user.name);
    let others = [&guest.agent_version, &guest.host_name, &guest.time_zone];
    let mut texts = os
        .chain(interfaces)
        .chain(file_systems)
        .chain(users)
        .chain(others);
    assert!(texts.all(|text| !text.contains(char::is_control)), "{guest:?}");
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        let commands = [
            "guest-get-osinfo",
            "guest-get-host-name",
            "guest-get-timezone",
            "guest-network-get-interfaces",
            "guest-get-fsinfo",
            "guest-get-users",
        ];
        let supported: Vec<_> = commands
            .iter()
            .map(|name| json!({"name": name, "enabled": true}))
            .collect();
        let about = json!({"version": "7.2.0", "supported_commands": supported});
        let answers = [
            about.clone(),
            json!({"name": "Debian GNU/Linux", "kernel-release": "6.1.0", "id": "debian"}),
            json!({"host-name": "web"}),
            json!({"zone": "CET", "offset": 3600}),
            json!([{"name": "eth0", "hardware-address": "52:54:00:00:00:01",
                    "ip-addresses": [{"ip-address": "10.0.0.5", "prefix": 24}]}]),
            json!([{"name": "vda1", "mountpoint": "/", "type": "ext4", "used-bytes": 5, "total-bytes": 9}]),
            json!([{"user": "ann", "login-time": 1.5e9}]),
        ];
        let lines = answers.map(|answer| format!("{}\n", json!({"return": answer})));
        let long = json!({"return": {"host-name": "\u{1b}".repeat(5000)}});
        vec![
            ("honest", lines.concat().into_bytes()),
            (
                "long",
                format!("{}\n{{}}\n{long}\n", json!({"return": about})).into_bytes(),
            ),
            (
                "refused",
                b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"x\"}}\n".to_vec(),
            ),
        ]
    }

    #[test]
    fn the_seeds_of_agents_do_no_harm() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/agent_answers");
        if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
            fs::create_dir_all(&folder).unwrap();
            for (name, seed) in seeds() {
                fs::write(folder.join(name), seed).unwrap();
            }
        }
        let mut count = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            agent_answers(&fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count >= seeds().len(), "{count} seeds in {}", folder.display());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn changed_answers_of_agents_do_no_harm(
            which in 0..3_usize,
            changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..6),
        ) {
            let mut data = seeds().swap_remove(which).1;
            for (place, value) in changes {
                let place = place % data.len();
                data[place] = value;
            }
            agent_answers(&data);
        }

        #[test]
        fn no_answers_of_agents_do_harm(data in prop::collection::vec(any::<u8>(), 0..600)) {
            agent_answers(&data);
        }
    }
}
