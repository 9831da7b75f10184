# cmake -D BUILD= -D SOURCE= -D EXAMPLES= -D SCRATCH= -D CXX= -D GENERATOR= -P consume.cmake
file(REMOVE_RECURSE ${SCRATCH})

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}: ${status}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${SCRATCH}/installed)
# Moved after the install, so that a path of the build that got into the package would be missed.
file(RENAME ${SCRATCH}/installed ${SCRATCH}/moved)
file(GLOB_RECURSE files ${SCRATCH}/moved/*.cmake ${SCRATCH}/moved/*.h)
foreach(file ${files})
  file(READ ${file} text)
  string(FIND "${text}" "${BUILD}" at)
  if(NOT at EQUAL -1)
    message(FATAL_ERROR "${file} names the build folder ${BUILD}")
  endif()
endforeach()

run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${SCRATCH}/build -D CMAKE_BUILD_TYPE=Release
    -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_PREFIX_PATH=${SCRATCH}/moved -D EXAMPLES=${EXAMPLES})
run(${CMAKE_COMMAND} --build ${SCRATCH}/build)
run(${SCRATCH}/build/swiglu)
run(${SCRATCH}/build/no_exceptions)
run(${SCRATCH}/moved/bin/qmlp info)
